# Status: never run on its target (Kubernetes and Docker). The machines that test this project have no Docker, so it was
# not built. Its commands are those of the README, docs/vllm.md and the Makefile, which a test compares; a test
# resolves its packages. PyTorch comes with its CUDA libraries; `docker run --gpus all` gives it the GPUs.
FROM python:3.11-slim
# gcc and libc6-dev: Triton compiles its launcher at the first use
RUN apt-get update && apt-get install -y --no-install-recommends make gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /jackpot
COPY . .
RUN make .venv/ready
RUN .venv/bin/pip install -c constraints.txt '.[vllm]'
RUN .venv/bin/pip install --quiet -c constraints.txt ray
ENV PATH=/jackpot/.venv/bin:$PATH
RUN useradd --create-home jackpot && mkdir /runs && chown jackpot /runs
USER jackpot
WORKDIR /runs
CMD ["jackpot", "--help"]
