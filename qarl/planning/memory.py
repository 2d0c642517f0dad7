"""What one process of a run holds in memory, part by part, from a model's sizes and the
configuration alone.

Most parts are there all the time. Activations come and go with micro-batches; beside them one more
thing is in the making at any time: a layer's backward, an optimizer step, or what the engine
computes; the largest counts. docs/guide/plan.md says how far this is from what was measured, and
that nothing was measured on a GPU.

Symbols: C hidden columns, Q and K columns of queries and of keys, I columns of the MLP or of an
expert, V vocabulary, E experts, N tokens of a micro-batch.
"""

from dataclasses import dataclass
from functools import cached_property

from qarl.configs.schema.lora import LoraConfig
from qarl.configs.schema.run import RunConfig
from qarl.configs.schemes import SCHEME_SPECS
from qarl.planning.machine import has_avx512
from qarl.planning.shapes import Shapes, schemes_of, targeted

GIB = 2**30
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
_FP32 = 4

LIBRARIES = {"cpu": 0.72 * GIB, "cuda": 1.5 * GIB}
"""Code and tables of torch, vLLM and transformers, measured; CUDA's context and cuBLAS's buffers,
assumed.
"""

_NCCL, _GRAPHS = 1.0 * GIB, 2.0 * GIB
"""Buffers of several processes, and memory that CUDA graphs of decoding keep: assumed."""

_LARGEST_PRODUCT = 1 << 25
"""Elements of a weight gradient that CUDA multiplies at once (`quant.layers.straight_through`)."""

_GROUPED = 8192
"""Tokens whose experts go backwards at once on GPUs (`quant.layers.grouped_backward`)."""

_AHEAD = 1 << 25
"""Elements of gradients on their way to other processes beside the largest
(`quant.layers.gradients.AHEAD`).
"""

_WIDE = (
    ("fp8",)
    if has_avx512()
    else ("fp8", "w8a8", "w4a16", "w4a16-g64", "w4a16-g32", "w4a16-channel")
)
"""Schemes whose kernel holds weights in fp32 on this machine's CPU (`quant.kernels.vllm_cpu`)."""

_ENGINE_TOKENS = {"cpu": 8192, "cuda": 16384}
"""That vLLM computes at once at most, and sizes its buffers for."""

_TRANSFORMERS_FACTOR = 2.0
"""What a layer keeps with transformers' operators, over the engine's: autograd's own intermediates.
An estimate.
"""


@dataclass(frozen=True)
class Part:
    """bytes: of one process, on its device. note: of what it is made."""

    name: str
    bytes: int
    note: str


@dataclass(frozen=True)
class Memory:
    """Of one process. parts: on its device. host: bytes in the host's memory beside them, while the
    model is loaded and for offloaded moments; 0 on CPUs, where all of it is the host's.
    """

    parts: tuple[Part, ...]
    host: int

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return sum(part.bytes for part in self.parts)


def counted(parameters: int) -> str:
    """A number of parameters in words."""
    large = parameters >= 1e9
    return f"{parameters / (1e9 if large else 1e6):.3g} {'billion' if large else 'million'}"


def cache_itemsize(config: RunConfig) -> int:
    """Bytes of a cached key's or value's element."""
    return ITEMSIZE[config.dtype] if config.quantization.kv_cache is None else 1


def count_memory(shapes: Shapes, config: RunConfig, device: str, processes: int) -> Memory:
    """config: with `rollout.kv_cache_gib` and `learner.gradient_checkpointing` decided. device:
    "cpu" or "cuda".
    """
    return _Count(shapes, config, device, processes).memory()


@dataclass(frozen=True)
class _Count:
    shapes: Shapes
    config: RunConfig
    device: str
    processes: int

    def memory(self) -> Memory:
        learner, shapes, scheme = self.config.learner, self.shapes, self.config.scheme
        trained = counted(self.trained)
        shared = f", 1/{self.shares} of them" if self.shares > 1 else ""
        of_masters = (
            "embeddings and a layer's" if self.waits_on_host else counted(shapes.parameters)
        )
        kept, working = self.activations(), self.working()
        checkpointing = (
            "layers computed again"
            if learner.gradient_checkpointing is True
            else "all layers' kept"
        )
        codes = (
            f"the learner's weights in {scheme}"
            if learner.keep_codes
            else f"{scheme} made when needed"
        )
        moves = (
            0
            if learner.aligned or self.config.quantization.init is None
            else shapes.quantized * _FP32
        )
        layout = 0 if self.config.shares_engine else self.own_products
        whose = "the learner's own" if learner.keep_kernel_layout else "a layer's"
        cached = self.cache() // shapes.key_value_bytes(cache_itemsize(self.config))
        parts = (
            Part(
                "masters",
                self.masters(),
                f"{of_masters} in {learner.master_dtype}{shared}",
            ),
            Part("moves", moves, "from masters to calibrated codes, float32"),
            Part("gradients", self.gradients(), f"{trained} in float32{shared}"),
            Part("moments", self.moments(), f"{learner.optimizer.name}, float32{shared}"),
            Part("codes", self.codes(), codes),
            Part("kernel layout", layout, whose),
            Part("reference", self.reference(), "of the KL penalty"),
            Part("ZeRO buffers", self.buffers(), "gradients on their way"),
            Part("engine", self.engine(), "its weights, CUDA graphs"),
            Part(
                "workspaces",
                self.workspaces(),
                "of experts' kernels, the engine's and the learner's",
            ),
            Part("KV cache", self.cache(), f"{cached:,} tokens"),
            Part("activations", kept, f"{self.tokens:,} tokens, {checkpointing}"),
            Part(
                "working",
                max(0, working - kept),
                "a layer's backward, a step, or the engine",
            ),
            Part(
                "libraries",
                self.libraries(),
                "measured" if self.device == "cpu" else "assumed",
            ),
        )
        return Memory(tuple(part for part in parts if part.bytes), self.host())

    @cached_property
    def itemsize(self) -> int:
        """Of the compute dtype."""
        return ITEMSIZE[self.config.dtype]

    @property
    def stage(self) -> int | None:
        """The ZeRO stage; None in one process without."""
        stage = self.config.learner.zero_stage
        return stage if stage is not None or self.processes == 1 else 0

    @property
    def shares(self) -> int:
        """Processes that moments are divided over; at stage 3 adapters are whole in each."""
        return (
            self.processes if self.stage in (1, 2) or (self.stage == 3 and not self.adapters) else 1
        )

    @cached_property
    def adapters(self) -> int:
        """Parameters of LoRA's factors, 0 without."""
        lora = self.config.learner.lora
        if not isinstance(lora, LoraConfig):
            return 0
        return lora.rank * targeted(self.shapes, lora.targets)

    @property
    def trained(self) -> int:
        return self.adapters or self.shapes.parameters

    @property
    def waits_on_host(self) -> bool:
        """Whether frozen matrices are in the host's memory, and one at a time here."""
        return self.device == "cuda" and self.config.learner.base_on_host

    def masters(self) -> int:
        here = (
            self.shapes.head + self.largest_module if self.waits_on_host else self.shapes.parameters
        )
        base = here * ITEMSIZE[self.config.learner.master_dtype]
        if self.stage == 3:
            return base // self.processes + self.adapters * _FP32
        return base + self.adapters * _FP32

    def gradients(self) -> int:
        return self.trained * _FP32 // (self.shares if self.stage in (2, 3) else 1)

    def moments(self, offloaded: bool = False) -> int:
        """On the device, or in the host's memory."""
        optimizer = self.config.learner.optimizer
        if (optimizer.offload == "cpu") != offloaded:
            return 0
        matrices = self.adapters or self.shapes.quantized
        one = matrices if optimizer.name == "muon" else 0
        return (2 * self.trained - one) * _FP32 // self.shares

    @cached_property
    def low_bit(self) -> int:
        """Of all quantized matrices as they are published."""
        return self._stored(())

    @cached_property
    def in_kernels(self) -> int:
        """The same in the layout that is multiplied."""
        return self._stored(_WIDE if self.device == "cpu" else ())

    def _stored(self, in_fp32: tuple[str, ...]) -> int:
        shapes, scheme, rules = self.shapes, self.config.scheme, self.config.layers
        if not rules:
            return (
                shapes.quantized * _FP32
                if scheme in in_fp32
                else shapes.quantized_bytes(scheme, self.itemsize)
            )
        parts = (
            (name, shape, SCHEME_SPECS[name].weight_bytes)
            for name, shape in schemes_of(shapes, scheme, rules)
        )
        return sum(
            o * i * _FP32 if name in in_fp32 else stored((o, i), self.itemsize)
            for name, (o, i), stored in parts
        )

    @property
    def outside(self) -> int:
        """Of embedding, output head and routers in the compute dtype. Learner, and the engine on
        CPUs, hold a tied one twice: to be looked up, and to be multiplied.
        """
        return (2 * self.shapes.head + self.shapes.router) * self.itemsize

    def codes(self) -> int:
        learner = self.config.learner
        casts = 0
        if not learner.aligned:
            casts = self.shapes.parameters * ITEMSIZE[learner.compute_dtype or self.config.dtype]
        low_bit = self.low_bit if learner.keep_codes else self.low_bit // self.shapes.layers
        return low_bit + self.outside + casts

    @property
    def own_products(self) -> int:
        """Of a model that multiplies with layers of its own; the reference dequantizes its
        matrices.
        """
        dequantizes = self.config.learner.kernel == "reference"
        matrices = self.shapes.quantized * self.itemsize if dequantizes else self.in_kernels
        at_once = (
            matrices if self.config.learner.keep_kernel_layout else matrices // self.shapes.layers
        )
        return at_once + self.shapes.head * self.itemsize

    def reference(self) -> int:
        if self.config.learner.kl.name == "none":
            return 0
        shares = self.processes if self.stage == 3 else 1
        base = self.shapes.parameters * ITEMSIZE[self.config.learner.master_dtype] // shares
        return base + self.codes() + self.own_products

    @property
    def gathers(self) -> bool:
        """Whether a module's whole gradient is made apart from the sum, to be reduced."""
        return self.stage is not None and not self.adapters

    def buffers(self) -> int:
        """The largest module's whole gradient, at stages 2 and 3 also those on their way to the
        processes that have the rows, elsewhere but for the head's (`head_backward`).
        """
        s = self.shapes
        whole = max(self.largest_matrix, 3 * s.experts * s.intermediate * s.hidden)
        if self.stage in (2, 3):
            whole = max(whole, s.head) + _AHEAD
        return whole * _FP32 if self.gathers else 0

    @property
    def engines(self) -> int:
        """In the process, or servers that it starts beside it."""
        servers = self.config.rollout.servers
        return int(self.config.engine_here) + (servers if isinstance(servers, int) else 0)

    def engine(self) -> int:
        if not self.engines:
            return 0
        s, b = self.shapes, self.itemsize
        if self.device == "cpu":
            return self.engines * (self.in_kernels + self.outside)
        graphs = 0 if self.config.rollout.enforce_eager else int(_GRAPHS)
        tied = s.head * b if s.tied else 0
        return self.in_kernels + self.outside - tied + graphs

    @property
    def workspace_a_token(self) -> int:
        """Of experts' kernels on GPUs, which grows to the largest batch and stays."""
        s = self.shapes
        return (
            s.experts_a_token * self.itemsize * (s.hidden + 3 * s.intermediate)
            if self.device == "cuda"
            else 0
        )

    def workspaces(self) -> int:
        engines = _ENGINE_TOKENS["cuda"] if self.config.engine_here else 0
        return self.workspace_a_token * (
            engines + (self.tokens if self.config.learner.aligned else 0)
        )

    def libraries(self) -> int:
        several = self.device == "cuda" and self.processes > 1
        return int(LIBRARIES[self.device] + (_NCCL if several else 0))

    def cache(self) -> int:
        return self.engines * (self.config.rollout.kv_cache_gib or 1) * GIB

    @property
    def largest_matrix(self) -> int:
        matrices = (*self.shapes.attention_matrices, *self.shapes.mlp_matrices)
        return max(rows * columns for rows, columns in matrices)

    @property
    def largest_module(self) -> int:
        """Parameters of the largest module that has masters of its own."""
        s = self.shapes
        return max(s.head, self.largest_matrix, 3 * s.experts * s.intermediate * s.hidden)

    @cached_property
    def tokens(self) -> int:
        """N: of a micro-batch, at most all of a mini-batch."""
        rollout, learner = self.config.rollout, self.config.learner
        mini_batch = -(-rollout.prompts // learner.mini_batches) * rollout.samples * rollout.longest
        return min(learner.micro_batch_tokens, mini_batch)

    @cached_property
    def kept_a_layer(self) -> float:
        """Bytes a token that one decoder layer keeps for its backward (`quant.graph`): of both
        norms what they normalize, of every product its input as multiplied, queries, keys and
        values before and after their rotation, gate and up; on GPUs attention's output and the sum
        of its scores.
        """
        s, b, cpu = self.shapes, self.itemsize, self.device == "cpu"
        a = SCHEME_SPECS[self.config.scheme].input_bytes(b) if self.config.learner.aligned else b
        c, q, k, i = (
            s.hidden,
            s.heads * s.head_dim,
            s.kv_heads * s.head_dim,
            s.intermediate,
        )
        attention = a * c + b * (2 * q + 3 * k)
        attention += a * q if cpu or a < b else 0
        attention += 0 if cpu else b * q + _FP32 * s.heads
        routed = (
            s.experts_a_token * (8 + 8 + _FP32 + b)
            if cpu
            else _FP32 * s.experts + 16 * s.experts_a_token
        )
        mlp = b * c + (a * c if a < b else 0) + routed if s.experts else a * c + 2 * b * i + a * i
        engines = self.config.learner.operators != "transformers" and self.config.learner.aligned
        return (2 * b * c + attention + mlp) * (1.0 if engines else _TRANSFORMERS_FACTOR)

    def activations(self) -> int:
        """What is kept between forward and backward."""
        s = self.shapes
        if self.config.learner.gradient_checkpointing is True:
            # Between layers pass a branch, and the residual that the next norm adds it to.
            a_token = s.layers * 2 * self.itemsize * s.hidden + self.kept_a_layer
        else:
            a_token = s.layers * self.kept_a_layer
        return int(self.tokens * (a_token + 2 * self.itemsize * s.hidden))

    def working(self) -> int:
        """The most that is there at once of what is not there all the time, activations
        included.
        """
        again = (
            self.kept_a_layer * self.tokens
            if self.config.learner.gradient_checkpointing is True
            else 0
        )
        learning = self.activations() + max(self.head_backward() - again, self.layer_backward())
        return int(max(learning, self.step(), self.sampling(), self.saving()))

    def saving(self) -> int:
        """A checkpoint's: a module's whole master and moments, on their way to the host, without
        gradients.
        """
        learner = self.config.learner
        if self.stage is None or self.adapters:
            return 0
        moments = 1 if learner.optimizer.name == "muon" else 2
        return (
            self.largest_module * (ITEMSIZE[learner.master_dtype] + moments * _FP32)
            - self.gradients()
        )

    def head_backward(self) -> float:
        """Logits and their gradient, in fp32 as well on GPUs; or there a part of the head's weight
        gradient; and where that is reduced the whole, which chunks add up.
        """
        chunk, b, c = (
            min(self.config.learner.logprob_chunk_tokens, self.tokens),
            self.itemsize,
            self.shapes.hidden,
        )
        logits = chunk * self.shapes.vocabulary
        if self.device == "cpu":
            return logits * 2 * b
        part = _FP32 * min(self.shapes.head, _LARGEST_PRODUCT)
        whole = max(0, _FP32 * self.shapes.head - self.buffers()) if self.gathers else 0
        kept = self.tokens * b + chunk * (_FP32 + 2 * b)
        return kept * c + whole + max(logits * 2 * (b + _FP32), logits * b + part)

    def layer_backward(self) -> float:
        """The larger of the MLP's, with the weight it dequantizes, and the attention's, in fp32 on
        CPUs.
        """
        s, b, n = self.shapes, self.itemsize, self.tokens
        c, q, k, i = (
            s.hidden,
            s.heads * s.head_dim,
            s.kv_heads * s.head_dim,
            s.intermediate,
        )
        weight, attention = (
            (2 * _FP32 + b) * self.largest_matrix,
            4 * q + 2 * (q + 2 * k),
        )
        if self.device == "cuda":
            # of dW before it is added
            weight += _FP32 * min(self.largest_matrix, _LARGEST_PRODUCT)
        if s.experts and self.device == "cuda" and self.config.dtype == "bfloat16":
            return n * (_FP32 + b) * c + max(self.experts_backward(), n * b * attention)
        if s.experts:
            mlp = (
                n * 3 * _FP32 * c
                + n * s.experts_a_token / s.experts * _FP32 * (6 * i + 2 * c)
                + weight
            )
        elif self.device == "cuda":
            # Of low-bit inputs the values are dequantized for dW. What the MLP kept is gone when
            # attention goes back.
            low_bit = SCHEME_SPECS[self.config.scheme].activations is not None
            return n * b * c + max(
                n * (2 * _FP32 + b if low_bit else 2 * b) * i,
                weight,
                n * b * (attention - 2 * i),
            )
        else:
            mlp = n * (3 * b * i + b * c) + weight
        return n * (_FP32 + b) * c + max(
            mlp, n * (b if self.device == "cuda" else _FP32) * attention
        )

    def experts_backward(self) -> float:
        """All experts' matrices, dequantized, and the more of what is there when a row's gate is
        derived and when the gradient of all gates and ups is, before it is added in fp32. Tokens
        before have left their inputs' gradients. tests/qarl/test_plan_activations.py holds it to a
        trace.
        """
        s, b, n = self.shapes, self.itemsize, self.tokens
        c, i = s.hidden, s.intermediate
        rows, matrices = min(n, _GROUPED) * s.experts_a_token, s.experts * i * c
        derived, summed = 2 * b * c + 38 * i + 40, 2 * b * c + 3 * b * i + 40
        a_token = _FP32 * (c + 2 * s.experts_a_token)
        gradients = a_token * n  # of the input and the weights; at the end put together
        before = gradients - a_token * min(n, _GROUPED)
        largest = max(
            before + rows * derived,
            gradients + rows * summed + 2 * b * matrices,
            2 * gradients,
        )
        quantized = SCHEME_SPECS[self.config.scheme].input_bytes(b) < b
        return 3 * b * matrices + largest + (n * b * c if quantized else 0)

    def step(self) -> float:
        """Of one master at a time: an fp32 copy of a 16-bit one, what Muon orthogonalizes, and,
        where lost updates are counted, the values before. From stage 1 on a process has its rows of
        a master, and what Muon orthogonalizes whole, with what is sent of it.
        """
        learner = self.config.learner
        largest = min(self.trained, self.largest_module) // self.shares
        matrix = min(self.trained, self.largest_matrix) * (2 if self.stage else 1)
        fp32_copy = (
            3 * _FP32 * largest if learner.master_dtype != "float32" and not self.adapters else 0
        )
        muon = (_FP32 + 3 * 2) * matrix if learner.optimizer.name == "muon" else 0
        lost = (_FP32 + 3) * largest if learner.diagnostics_every else 0
        fetched = 2 * _FP32 * largest if learner.optimizer.offload == "cpu" else 0
        # Weights with their adapters added, of one module: all its experts', and once more to stack
        # them.
        merged = 2 * self.largest_module * ITEMSIZE[learner.master_dtype] if self.adapters else 0
        return max(fp32_copy + max(muon, lost) + fetched, merged)

    def sampling(self) -> float:
        """The engine's own activations: of the tokens it computes at once, and of the logits it
        samples from.
        """
        if not self.config.engine_here:
            return 0
        s, b, rollout = self.shapes, self.itemsize, self.config.rollout
        sequences = min(
            rollout.max_num_seqs,
            -(-rollout.prompts // self.processes) * rollout.samples,
        )
        tokens = _ENGINE_TOKENS[self.device]
        if self.device == "cpu":
            tokens = min(tokens, sequences * rollout.max_prompt_tokens)
        i = s.intermediate * (s.experts_a_token if s.experts else 1)
        routed = s.experts_a_token * s.hidden if s.experts else 0
        a_token = b * (4 * s.hidden + (s.heads + 2 * s.kv_heads) * s.head_dim + 3 * i + routed)
        return tokens * (a_token - self.workspace_a_token) + 3 * _FP32 * sequences * s.vocabulary

    def host(self) -> int:
        """The larger of loading and of offloaded moments with a checkpoint's share beside them.
        Loading: a model in the masters' dtype; at stage 3 a process's rows of it, whole embeddings,
        and a matrix or its experts of a layer three times: as read, stacked, and put together.
        """
        if self.device == "cpu":
            return 0
        size = ITEMSIZE[self.config.learner.master_dtype]
        masters, offloaded = self.shapes.parameters * size, self.moments(offloaded=True)
        s = self.shapes
        read = max(
            self.largest_matrix,
            3 * s.experts * s.intermediate * s.hidden // self.processes,
        )
        whole = (2 * s.head + 3 * read) * size
        loading = masters // self.processes + whole if self.stage == 3 else masters
        if self.stage is None or self.adapters:
            return max(loading, offloaded)
        saved = (masters + self.moments() * self.shares) // self.processes + offloaded
        return max(loading, offloaded + saved)
