# QaRL on CPUs.  docker build -f docker/cpu.Dockerfile -t qarl .   then   docker run -v "$PWD/runs:/data/runs" qarl train
FROM python:3.11-slim-bookworm

COPY . /src
RUN bash /src/docker/install.sh cpu

RUN useradd --create-home qarl && mkdir /data && chown qarl /data
USER qarl
WORKDIR /data
ENTRYPOINT ["qarl"]
CMD ["--help"]
