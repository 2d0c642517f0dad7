"""The memory of one process of a run, part by part, computed from the model's sizes and the
configuration alone.

Most parts are allocated for the whole run. Activations come and go with each micro-batch. On top of
them one more thing is computed at any time: a layer's backward, an optimizer step, a checkpoint or
the engine's own step. The largest of these counts (`Count.working`). docs/guide/plan.md says how
far the plan is from measured peaks; nothing was measured on a GPU.

`qarl.planning.activations` counts what a micro-batch keeps and what a layer's backward takes. The
symbols of the derivations (N, C, V, …) are listed there. A formula marked "not derived" was fitted
to a trace or assumed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from qarl.configs.deepspeed_file import DeepSpeedFile, read_deepspeed_file
from qarl.configs.schema.lora import LoraConfig
from qarl.configs.schema.run import RunConfig
from qarl.configs.schemes import SCHEME_SPECS
from qarl.planning.activations import Activations
from qarl.planning.machine import has_avx512
from qarl.planning.shapes import ITEMSIZE, Shapes, schemes_of, targeted
from qarl.quant.limits import GRADIENTS_IN_FLIGHT, LARGEST_PRODUCT

GIB = 2**30
_FP32 = 4
_BF16 = 2

LIBRARIES = {"cpu": 0.72 * GIB, "cuda": 1.5 * GIB}
"""Bytes of the code and tables of torch, vLLM and transformers.

CPU: measured. CUDA: assumed; includes CUDA's context and cuBLAS's buffers.
"""

_NCCL = 1.0 * GIB
"""NCCL's buffers when there are several processes. Assumed."""

_CUDA_GRAPHS = 2.0 * GIB
"""Memory that the CUDA graphs of decoding keep. Assumed."""

_WIDE = tuple(name for name, spec in SCHEME_SPECS.items() if spec.fp32_on_cpus(has_avx512()))
"""Schemes whose kernel holds weights in fp32 on this machine's CPU (`quant.kernels.vllm_cpu`)."""

_SAMPLED_LOGITS = 3
"""fp32 copies of the logits that the engine's sampler has at once. An estimate, not derived."""


@dataclass(frozen=True)
class Part:
    """One line of a plan's table."""

    name: str

    bytes: int
    """Bytes that one process takes on its device."""

    note: str
    """Contents of the part, in a few words."""


@dataclass(frozen=True)
class Memory:
    """The memory of one process."""

    parts: tuple[Part, ...]
    """Parts on the device, none of them empty."""

    host: int
    """Bytes of host memory besides the device's, for loading the model and for offloaded moments.

    0 on CPUs, where all parts are in the host's memory.
    """

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return sum(part.bytes for part in self.parts)


def counted(parameters: int) -> str:
    """Format a number of parameters, such as "8.19 billion"."""
    large = parameters >= 1e9
    return f"{parameters / (1e9 if large else 1e6):.3g} {'billion' if large else 'million'}"


def cache_itemsize(config: RunConfig) -> int:
    """Return the bytes of one element of a cached key or value."""
    return ITEMSIZE[config.dtype] if config.quantization.kv_cache is None else 1


def count_memory(shapes: Shapes, config: RunConfig, device: str, processes: int) -> Memory:
    """Compute the memory of one process.

    Args:
        shapes: sizes of the model.
        config: configuration in which `rollout.kv_cache_gib` and
            `learner.gradient_checkpointing` are decided.
        device: "cpu" or "cuda".
        processes: number of processes of the run.
    """
    return Count(shapes, config, device, processes).memory()


@dataclass(frozen=True)
class Count:
    """The sums of one plan; the arguments are those of `count_memory`."""

    shapes: Shapes
    config: RunConfig
    device: str
    processes: int

    @cached_property
    def batch(self) -> Activations:
        """Activations of a micro-batch, and its sizes."""
        return Activations(self.shapes, self.config, self.device)

    def memory(self) -> Memory:
        """Return the parts, and what the host holds."""
        return Memory(tuple(part for part in self._parts() if part.bytes), self.host())

    def _parts(self) -> Iterator[Part]:
        """All parts, also empty ones, in the order of the table."""
        learner = self.config.learner
        shared = f", 1/{self.shares} of them" if self.shares > 1 else ""

        resident = "embeddings and a layer's" if self.waits_on_host else None
        master_count = resident or counted(self.shapes.parameters)
        yield Part("masters", self.masters(), f"{master_count} in {learner.master_dtype}{shared}")
        yield Part("moves", self._moves(), "from masters to calibrated codes, float32")
        trained = counted(self.trained)
        yield Part("gradients", self.gradients(), f"{trained} in float32{shared}")
        yield Part("moments", self.moments(), f"{learner.optimizer.name}, float32{shared}")

        scheme = self.config.scheme
        cached_codes = f"the learner's weights in {scheme}"
        codes = cached_codes if learner.keep_codes else f"{scheme} made when needed"
        yield Part("codes", self.codes(), codes)
        layout = 0 if self.config.shares_engine else self.kernel_layouts
        whose = "the learner's own" if learner.keep_kernel_layout else "a layer's"
        yield Part("kernel layout", layout, whose)
        yield Part("reference", self.reference(), "of the KL penalty")
        yield Part("sent gradients", self.buffers(), "a layer's, not yet divided")

        ranks = self.config.rollout.tensor_parallel_size
        divided = f" in {ranks} ranks" if ranks > 1 else ""
        yield Part("engine", self.engine(), f"its weights{divided}, CUDA graphs")
        kernels = "of experts' kernels, the engine's and the learner's"
        yield Part("workspaces", self.workspaces(), kernels)
        cached_tokens = self.cache() // self.shapes.key_value_bytes(cache_itemsize(self.config))
        yield Part("KV cache", self.cache(), f"{cached_tokens:,} tokens")

        activations = self.batch.kept()
        recomputed = learner.gradient_checkpointing is True
        checkpointing = "layers computed again" if recomputed else "all layers' kept"
        yield Part("activations", activations, f"{self.batch.tokens:,} tokens, {checkpointing}")
        # `working` includes the activations, which have a line of their own.
        working = max(0, self.working() - activations)
        yield Part("working", working, "a layer's backward, a step, or the engine")
        source = "measured" if self.device == "cpu" else "assumed"
        yield Part("libraries", self.libraries(), source)

    @property
    def base_shares(self) -> int:
        """Number of processes that the model's masters are divided over; a base on the host is not.

        See `learner.optim.sharded.masters_mesh`.
        """
        whole = self.config.learner.base_on_host or self.deepspeed is not None
        return 1 if whole else self.processes

    @property
    def shares(self) -> int:
        """Number of processes that gradients and moments are divided over.

        Without DeepSpeed every process has all of each adapter.
        """
        if self.deepspeed is not None:
            return self.processes
        return 1 if self.adapters else self.base_shares

    @cached_property
    def deepspeed(self) -> DeepSpeedFile | None:
        """What the run takes of `learner.deepspeed`; None without."""
        path = self.config.learner.deepspeed
        return None if path is None else read_deepspeed_file(path)

    @property
    def offloads(self) -> bool:
        """True if moments wait in the host's memory."""
        if self.deepspeed is not None:
            return self.deepspeed.offloads
        return self.config.learner.optimizer.offload == "cpu"

    @property
    def _stepped_copy(self) -> int:
        """Bytes of the fp32 copy of a process's part of the masters, which DeepSpeed steps."""
        return 0 if self.deepspeed is None else self.trained * _FP32 // self.shares

    @cached_property
    def adapters(self) -> int:
        """Parameters of LoRA's factors; 0 without LoRA."""
        lora = self.config.learner.lora
        if not isinstance(lora, LoraConfig):
            return 0
        # An [O, I] matrix gets factors [O, rank] and [rank, I]; `targeted` adds up O + I.
        return lora.rank * targeted(self.shapes, lora.targets)

    @property
    def trained(self) -> int:
        """Parameters that are trained."""
        return self.adapters or self.shapes.parameters

    @property
    def waits_on_host(self) -> bool:
        """True if frozen matrices stay in the host's memory and visit the GPU one at a time."""
        return self.device == "cuda" and self.config.learner.base_on_host

    def masters(self) -> int:
        """Masters in their dtype, and LoRA's factors, which are always fp32."""
        shapes = self.shapes
        # A frozen base on the host leaves the embeddings here, and the module being computed.
        resident = shapes.head + self.largest_module if self.waits_on_host else shapes.parameters
        base = resident * ITEMSIZE[self.config.learner.master_dtype]
        copy = 0 if self.offloads else self._stepped_copy
        return base // self.base_shares + self.adapters * _FP32 + copy

    def _moves(self) -> int:
        """The fp32 tensors that an unaligned learner adds to its masters before rounding them.

        `quant.layers.low_bit_layer.LowBitLayer.offsets` has one tensor of each quantized master's
        shape when a run starts from calibrated codes.
        """
        if self.config.learner.aligned or self.config.quantization.init is None:
            return 0
        return self.shapes.quantized * _FP32

    def gradients(self) -> int:
        """One fp32 gradient of each trained parameter; DeepSpeed's stage 1 divides none."""
        divided = self.deepspeed is None or self.deepspeed.stage == 2
        return self.trained * _FP32 // (self.shares if divided else 1)

    def moments(self, offloaded: bool = False) -> int:
        """The optimizer's fp32 moments on the device, or the part that is in the host's memory."""
        optimizer = self.config.learner.optimizer
        if self.offloads != offloaded:
            return 0
        # AdamW has two moments of each parameter. Muon has one of each matrix, and leaves the rest
        # to AdamW.
        matrices = self.adapters or self.shapes.quantized
        saved_by_muon = matrices if optimizer.name == "muon" else 0
        return (2 * self.trained - saved_by_muon) * _FP32 // self.shares

    @cached_property
    def low_bit(self) -> int:
        """Bytes of all quantized matrices as they are published."""
        return self._stored(())

    @cached_property
    def in_kernels(self) -> int:
        """Bytes of all quantized matrices in the layout that kernels multiply."""
        return self._stored(_WIDE if self.device == "cpu" else ())

    def _stored(self, in_fp32: tuple[str, ...]) -> int:
        """Bytes of all quantized matrices, where those of the schemes `in_fp32` are in fp32."""
        shapes = self.shapes
        scheme = self.config.scheme
        if not self.config.layers:
            if scheme in in_fp32:
                return shapes.quantized * _FP32
            return shapes.quantized_bytes(scheme, self.batch.itemsize)
        # With rules for single layers every matrix may have another scheme.
        total = 0
        for _, name, (rows, columns) in schemes_of(shapes, scheme, self.config.layers):
            if name in in_fp32:
                total += rows * columns * _FP32
            else:
                total += SCHEME_SPECS[name].weight_bytes((rows, columns), self.batch.itemsize)
        return total

    @property
    def outside(self) -> int:
        """Bytes of embedding, output head and routers in the compute dtype.

        A tied head counts twice: the learner, and the engine on CPUs, has one copy to look up rows
        in and another to multiply with.
        """
        return (2 * self.shapes.head + self.shapes.router) * self.batch.itemsize

    def codes(self) -> int:
        """The learner's codes with everything it does not quantize.

        An unaligned learner also has a cast of each master, which it multiplies. If codes are not
        cached, those of one layer at a time exist.
        """
        learner = self.config.learner
        casts = 0
        if not learner.aligned:
            casts = self.shapes.parameters * ITEMSIZE[learner.compute_dtype or self.config.dtype]
        low_bit = self.low_bit if learner.keep_codes else self.low_bit // self.shapes.layers
        return low_bit + self.outside + casts

    @property
    def kernel_layouts(self) -> int:
        """Bytes of the kernel layout of a model that does not share the engine's layers.

        The family "reference" dequantizes its matrices to the compute dtype. The output head is
        multiplied in that dtype by every family.
        """
        learner = self.config.learner
        dequantizes = learner.kernel == "reference"
        matrices = self.shapes.quantized * self.batch.itemsize if dequantizes else self.in_kernels
        cached = matrices if learner.keep_kernel_layout else matrices // self.shapes.layers
        return cached + self.shapes.head * self.batch.itemsize

    def reference(self) -> int:
        """The reference policy of the KL penalty: masters, codes and kernel layout of its own."""
        if self.config.learner.kl.name == "none":
            return 0
        masters = self.shapes.parameters * ITEMSIZE[self.config.learner.master_dtype]
        base = masters // self.base_shares
        return base + self.codes() + self.kernel_layouts

    @property
    def gathers(self) -> bool:
        """True if a module's whole gradient is a tensor of its own, which is reduced and dropped.

        Otherwise gradients are added to `master.grad` where they are made.
        """
        return self.shares > 1

    def buffers(self) -> int:
        """The whole fp32 gradients that are being reduced over the processes during the backward.

        See `quant.layers.gradients.Gradients.wait_for_memory`.
        """
        if not self.gathers:
            return 0
        largest = max(self.shapes.largest_matrix, self.shapes.layer_experts, self.shapes.head)
        return (largest + GRADIENTS_IN_FLIGHT) * _FP32

    @property
    def engines(self) -> int:
        """Number of engines: one in the process, or the servers that it starts on its machine."""
        servers = self.config.rollout.servers
        return int(self.config.engine_here) + (servers if isinstance(servers, int) else 0)

    def engine(self) -> int:
        """Weights of the engines in the kernels' layout, with CUDA graphs on GPUs."""
        if not self.engines:
            return 0
        shapes = self.shapes
        if self.device == "cpu":
            return self.engines * (self.in_kernels + self.outside)
        graphs = 0 if self.config.rollout.enforce_eager else int(_CUDA_GRAPHS)
        # On GPUs vLLM has one tensor for a tied embedding and head, and `outside` counts two.
        tied = shapes.head * self.batch.itemsize if shapes.tied else 0
        return self.in_kernels + self.outside - tied + graphs

    @property
    def workspace_a_token(self) -> int:
        """Bytes a token of the workspace of experts' kernels on GPUs.

        The workspace grows to the largest batch and is not freed.
        """
        shapes = self.shapes
        if self.device != "cuda":
            return 0
        # A routed row has gate and up (2·I), their product (I) and the output (C), so that a token
        # has T · b · (C + 3·I).
        row = shapes.hidden + 3 * shapes.intermediate
        return shapes.experts_a_token * self.batch.itemsize * row

    def workspaces(self) -> int:
        """Workspaces of experts' kernels, the engine's and an aligned learner's."""
        rollout = self.config.rollout
        engine_tokens = rollout.batched_tokens("cuda") if self.config.engine_here else 0
        learner_tokens = self.batch.tokens if self.config.learner.aligned else 0
        return self.workspace_a_token * (engine_tokens + learner_tokens)

    def libraries(self) -> int:
        """Libraries' own memory, with NCCL's for several GPUs."""
        several = self.device == "cuda" and self.processes > 1
        return int(LIBRARIES[self.device] + (_NCCL if several else 0))

    def cache(self) -> int:
        """KV caches of all engines, one for each rank."""
        rollout = self.config.rollout
        ranks = self.engines * rollout.tensor_parallel_size
        return ranks * (rollout.kv_cache_gib or 1) * GIB

    @property
    def largest_module(self) -> int:
        """Parameters of the largest module that has masters of its own.

        That is the output head, a matrix, or all experts of one layer.
        """
        return max(self.shapes.head, self.shapes.largest_matrix, self.shapes.layer_experts)

    def working(self) -> int:
        """Peak of what is not allocated for the whole run, activations included."""
        recomputed = 0.0
        if self.config.learner.gradient_checkpointing is True:
            # The head's backward is over before any layer is computed again.
            recomputed = self.batch.layer_kept * self.batch.tokens
        backward = max(self.head_backward() - recomputed, self.batch.layer_backward())
        learning = self.batch.kept() + backward
        return int(max(learning, self.step(), self.sampling(), self.saving()))

    def saving(self) -> int:
        """A checkpoint's peak: one module's whole master and moments on their way to the host.

        Gradients are dropped by then, so that their memory is free for it.
        """
        learner = self.config.learner
        if self.shares == 1:
            return 0
        moments = 1 if learner.optimizer.name == "muon" else 2
        a_parameter = ITEMSIZE[learner.master_dtype] + moments * _FP32
        return self.largest_module * a_parameter - self.gradients()

    def head_backward(self) -> float:
        """Bytes of the backward of log-probs and output head, a chunk of tokens at a time.

        See `learner.logprobs._Normalized` and `layers.straight_through`.
        """
        itemsize = self.batch.itemsize
        hidden = self.shapes.hidden
        chunk = min(self.config.learner.logprob_chunk_tokens, self.batch.tokens)
        logits = chunk * self.shapes.vocabulary
        if self.device == "cpu":
            # Logits and their gradient in the compute dtype; fp32 values exist a block at a time.
            return logits * 2 * itemsize
        # Logits and their gradient, once in the compute dtype and once in fp32. Later the logits'
        # gradient in the compute dtype, and a part of the weight's in fp32.
        part = _FP32 * min(self.shapes.head, LARGEST_PRODUCT)
        largest = max(logits * 2 * (itemsize + _FP32), logits * itemsize + part)
        # Chunks add up the head's whole gradient before it is reduced
        # (`Gradients.defer_reductions`); what `buffers` counts is not counted again.
        reduced = max(0, _FP32 * self.shapes.head - self.buffers()) if self.gathers else 0
        # The gradient of the head's whole input, [N, C]. The rest, of a chunk's input, was taken
        # from the trace; not derived.
        input_gradient = self.batch.tokens * itemsize + chunk * (_FP32 + 2 * itemsize)
        return input_gradient * hidden + reduced + largest

    def step(self) -> float:
        """Bytes of an optimizer step, one master at a time (`optim.parameter_optimizer`).

        A process steps its rows of a master. Muon's matrices are whole in the
        process that orthogonalizes them, and their rows are sent there and back.
        """
        learner = self.config.learner
        largest = min(self.trained, self.largest_module) // self.shares
        matrix = min(self.trained, self.shapes.largest_matrix) * (2 if self.shares > 1 else 1)
        # A 16-bit master as fp32, and two more of that size for stochastic rounding: random bits
        # and the rounded values.
        sixteen_bit = learner.master_dtype != "float32" and not self.adapters
        fp32_copy = 3 * _FP32 * largest if sixteen_bit else 0
        # Muon's update in fp32, and three bf16 matrices of Newton-Schulz (`optim.muon`).
        muon = (_FP32 + 3 * _BF16) * matrix if learner.optimizer.name == "muon" else 0
        # To count lost updates: the values before, counted as fp32, and three masks of one byte:
        # not stored, meant, and both (`ParameterOptimizer._counts`).
        lost = (_FP32 + 3) * largest if learner.diagnostics_every else 0
        # Two offloaded moments, on the device for their step.
        fetched = 2 * _FP32 * largest if learner.optimizer.offload == "cpu" else 0
        # Weights with their adapters added, of one module: all its experts', and once more to stack
        # them.
        merged = 2 * self.largest_module * ITEMSIZE[learner.master_dtype] if self.adapters else 0
        return max(fp32_copy + max(muon, lost) + fetched, merged)

    def sampling(self) -> float:
        """Bytes of the engine's own activations and of the logits it samples from."""
        if not self.config.engine_here:
            return 0
        shapes = self.shapes
        rollout = self.config.rollout
        prompts = -(-rollout.prompts // self.processes)  # rounded up
        sequences = min(rollout.max_num_seqs, prompts * rollout.samples)
        tokens = rollout.batched_tokens(self.device)
        if self.device == "cpu":
            tokens = min(tokens, sequences * rollout.max_prompt_tokens)
        # A token's columns, an estimate by the model's layers: residual, norm, a branch's input and
        # output (4·C); queries, keys and values (Q + 2·K); gate, up and their product (3·I); the
        # experts' outputs (T·C). vLLM's buffers were not traced.
        active_experts = shapes.experts_a_token if shapes.experts else 1
        intermediate = shapes.intermediate * active_experts
        routed = shapes.experts_a_token * shapes.hidden if shapes.experts else 0
        attention = self.shapes.query_columns + 2 * self.shapes.key_columns
        columns = 4 * shapes.hidden + attention + 3 * intermediate + routed
        # `workspaces` counts what experts' kernels take of it.
        a_token = self.batch.itemsize * columns - self.workspace_a_token
        logits = _SAMPLED_LOGITS * _FP32 * sequences * shapes.vocabulary
        return tokens * a_token + logits

    def host(self) -> int:
        """Bytes of host memory: the larger of loading, and of offloaded moments with a checkpoint.

        Loading takes a model in the masters' dtype. Several processes take their rows of it, the
        whole embeddings, and three copies of a matrix, or of the process's experts of a layer: as
        read, stacked, and put together.
        """
        if self.device == "cpu":
            return 0
        itemsize = ITEMSIZE[self.config.learner.master_dtype]
        masters = self.shapes.parameters * itemsize
        offloaded = self.moments(offloaded=True)
        if self.offloads:
            # DeepSpeed steps its copy of the masters there, by a copy of the gradients.
            offloaded += 2 * self._stepped_copy
        loading = masters
        if self.base_shares > 1:
            read = max(self.shapes.largest_matrix, self.shapes.layer_experts // self.processes)
            whole = (2 * self.shapes.head + 3 * read) * itemsize
            loading = masters // self.processes + whole
        if self.shares == 1:
            return max(loading, offloaded)
        # A process writes its share of all masters and moments.
        saved = (masters + self.moments() * self.shares) // self.processes + offloaded
        return max(loading, offloaded + saved)
