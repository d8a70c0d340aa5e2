# Taper's server, on a CPU.
#
#     docker build --tag taper-server .
#     docker run --init --publish 8000:8000 --volume taper-models:/models --env TAPER_API_KEY=KEY taper-server
#
# Clients send KEY as a bearer token. The volume keeps models, which are fetched when they are first needed. Options of
# `taper serve` come as variables, such as `--env TAPER_SERVE_MODEL=qwen2.5-coder-1.5b-instruct`, or after the name of
# the image: `taper-server taper serve --host 0.0.0.0 --policy fast`.
FROM python:3.12-slim AS build
WORKDIR /src
RUN python -m venv /opt/taper
COPY pyproject.toml setup.py constraints.txt README.md LICENSE ./
COPY src src
RUN /opt/taper/bin/pip install --no-cache-dir -c constraints.txt ".[serve]"

FROM python:3.12-slim
COPY --from=build /opt/taper /opt/taper
RUN useradd --create-home --uid 1000 taper \
    && install --directory --owner taper --group taper /models
ENV PATH=/opt/taper/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    TAPER_CACHE=/models \
    HF_HOME=/models/huggingface
USER 1000
WORKDIR /home/taper
VOLUME /models
EXPOSE 8000
# The first start fetches the model before it answers.
HEALTHCHECK --start-period=15m --interval=30s --timeout=5s \
    CMD ["python", "-c", "import os, http.client as http; c = http.HTTPConnection('127.0.0.1', int(os.environ.get('TAPER_SERVE_PORT', 8000)), timeout=4); c.request('GET', '/health'); exit(c.getresponse().status != 200)"]
CMD ["taper", "serve", "--host", "0.0.0.0"]
