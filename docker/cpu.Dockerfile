# QaRL on CPUs.  docker build -f docker/cpu.Dockerfile -t qarl .   then   docker run -v "$PWD/runs:/work/runs" qarl train
FROM python:3.11-slim-bookworm

COPY . /src
RUN bash /src/docker/install.sh cpu

RUN useradd --create-home qarl && mkdir /work && chown qarl /work
USER qarl
WORKDIR /work
ENTRYPOINT ["qarl"]
CMD ["--help"]
