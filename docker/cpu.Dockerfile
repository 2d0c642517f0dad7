# QaRL on CPUs.  docker build -f docker/cpu.Dockerfile -t qarl .   then   docker run -v "$PWD/runs:/data/runs" qarl train
FROM python:3.11-slim-bookworm

COPY . /src
# vLLM's operators need libnuma. pycosat, which reasoning-gym asks for, has no wheel and is built with gcc, which
# nothing needs later.
RUN apt-get update && apt-get install --yes --no-install-recommends libnuma1 gcc libc6-dev \
    && bash /src/docker/install.sh cpu \
    && apt-get purge --yes --auto-remove gcc libc6-dev && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home qarl && mkdir /data && chown qarl /data
USER qarl
WORKDIR /data
ENTRYPOINT ["qarl"]
CMD ["--help"]
