# QaRL on NVIDIA GPUs; not run on one yet.  docker build -f docker/cuda.Dockerfile -t qarl-cuda .
# then   docker run --gpus all --shm-size 16g -v "$PWD/runs:/data/runs" qarl-cuda train --model Qwen/Qwen3-8B-Base
FROM python:3.11-slim-bookworm

# Triton and torch.compile build their kernels with gcc, at run time.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc g++ && rm -rf /var/lib/apt/lists/*

COPY . /src
RUN bash /src/docker/install.sh cuda

RUN useradd --create-home qarl && mkdir /data && chown qarl /data
USER qarl
WORKDIR /data
ENTRYPOINT ["qarl"]
CMD ["--help"]
