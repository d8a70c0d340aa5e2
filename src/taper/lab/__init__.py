"""The laboratory: what measures and trains, apart from what runs. Nothing but the command line imports it."""
