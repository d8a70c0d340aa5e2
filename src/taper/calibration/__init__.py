"""What a model can spare: references, search, curve, proof. `calibrate` is the way in; `report` draws what it found."""
