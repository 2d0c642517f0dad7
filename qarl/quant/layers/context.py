"""The settings and state that all low-bit layers of one model share, in one object.

Each layer is given this object when it is built.
"""

import math
from contextlib import AbstractContextManager
from enum import Enum

import torch

from qarl.quant.kernels import KernelFactory, make_factory
from qarl.quant.kernels.fp8_sums import fp8_sum_error
from qarl.quant.layers.gradients import Gradients
from qarl.quant.runtime.replaced import replaced
from qarl.quant.schemes import Scheme, SchemeError


class Forward(Enum):
    """Values of the weights that a forward can multiply."""

    LEARNER = "learner"
    """The values that are trained: an aligned learner's codes, or an unaligned learner's masters in
    its compute dtype.
    """
    PUBLISHED = "published"
    """The codes, in the engine's dtype."""
    UNQUANTIZED = "unquantized"
    """The masters, cast to the engine's dtype."""
    FP32 = "fp32"
    """The masters, in fp32."""


class LayerContext:
    """Settings and state of the layers of one model.

    Raises `SchemeError` if an aligned learner is given a compute dtype other than the engine's, and
    `KernelError` if the kernel cannot run on this machine.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        kernel_family: str,
        aligned: bool = True,
        compute_dtype: torch.dtype | None = None,
        kv_cache: str | None = None,
        device: torch.device | None = None,
        ranks: int = 1,
    ):
        if aligned and compute_dtype not in (None, dtype):
            raise SchemeError(
                f"an aligned learner multiplies the engine's codes in the engine's dtype, {dtype},"
                f" not {compute_dtype}; leave the compute dtype out, or set aligned false"
            )
        self.dtype = dtype
        """The engine's compute dtype: of activations, embeddings, norms, and published scales."""
        self.compute_dtype = compute_dtype or dtype
        """Compute dtype of an unaligned learner's forward. Default: `dtype`."""
        self.kernel_family = kernel_family
        """Family of kernels that multiply the codes, one of `quant.kernels.KERNELS`."""
        self.aligned = aligned
        """If True, the learner multiplies the codes. If False, it multiplies its masters cast to
        the compute dtype (the plain quantized-rollout baseline); codes are still made for
        publishing.
        """
        self.kv_cache = kv_cache
        """Format of the engine's cached keys and values: "fp8" (e4m3), or None for `dtype`.
        Forwards over codes round keys and values the same way.
        """
        self.device = device
        """Device on which codes are made and multiplied. None: the masters' device
        (`quant.checkpoint.load.matrices_on_host`).
        """
        self.ranks = ranks
        """Number of ranks of the engine (`rollout.tensor_parallel_size`), whose products forwards
        over codes sum as the engine does (`quant.kernels.ranks`).
        """
        self.gradients = Gradients()
        """Settings and state of the backward's gradients of masters."""
        self.checkpointing = False
        """If True, decoder layers keep only their input for the backward (activation
        checkpointing).
        """
        self.engine: KernelFactory | None = None
        """Factory of the running engine's own layers, which replace the learner's own kernels; None
        if they are not shared. The engine's layers hold each weight version before it is used.
        """
        self.keeps_kernels = True
        """If True, layers also cache the codes in the layout of their own kernels. If False,
        kernels are prepared again at every use.
        """
        self.keeps_codes = True
        """If True, layers cache the codes of a version. If False, codes are recomputed at every
        use: slower, less memory.
        """
        self._own = make_factory(kernel_family, dtype)
        """Factory of the learner's own kernels."""
        self.forward = Forward.LEARNER
        """Values of the weights that the present forward multiplies."""
        self._roundings: torch.Generator | None = None
        """Source of the perturbations within `other_roundings`; None outside."""

    def drop_codes(self) -> None:
        """Make layers recompute a version's codes at every use."""
        self.keeps_codes = False

    def drop_kernels(self) -> None:
        """Make layers prepare their kernels again at every use."""
        self.keeps_kernels = False

    def divide_among(self, ranks: int) -> None:
        """Multiply as `ranks` ranks of the engine do; kernels prepared before do not."""
        self.ranks = ranks

    def multiply_with(self, engine: KernelFactory | None) -> None:
        """Multiply with the running engine's own layers, or with kernels of their own (None)."""
        self.engine = engine

    def set_checkpointing(self, checkpointing: bool) -> None:
        """Set whether decoder layers keep only their input for the backward."""
        self.checkpointing = checkpointing

    @property
    def factory(self) -> KernelFactory:
        """Factory of the layers' kernels: the engine's layers if they are shared, else own ones."""
        return self.engine or self._own

    @property
    def multiplies_codes(self) -> bool:
        """True if this forward multiplies the published codes."""
        return self.forward is Forward.PUBLISHED or (
            self.aligned and self.forward is Forward.LEARNER
        )

    @property
    def forward_dtype(self) -> torch.dtype:
        """Dtype of the inputs and outputs of a layer's forward."""
        if self.forward is Forward.FP32:
            return torch.float32
        return self.compute_dtype if self.forward is Forward.LEARNER else self.dtype

    def forward_as(self, forward: Forward) -> AbstractContextManager[None]:
        """Return a context within which every layer multiplies the values that `forward` names."""
        return replaced(self, forward=forward)

    def other_roundings(self, seed: int) -> AbstractContextManager[None]:
        """Return a context within which every product's results are perturbed at random.

        Each result moves by up to one unit in its last place, and by more where sums are less
        precise than that (`quant.kernels.fp8_sums`). Another correct implementation, which sums in
        another order, may give such results.
        """
        return replaced(self, _roundings=torch.Generator().manual_seed(seed))

    def rounded(
        self, output: torch.Tensor, scheme: Scheme | None = None, columns: int = 0
    ) -> torch.Tensor:
        """Return the output of a product, perturbed inside `other_roundings` and else unchanged.

        scheme, columns: the product's, as `fp8_sum_error` takes them. None: sums are exact.
        """
        if self._roundings is None:
            return output
        drawn = torch.rand(output.shape, generator=self._roundings, dtype=torch.float32)
        # eps is the unit in the last place of a value in [1, 2); half of it rounds away
        unit = torch.finfo(output.dtype).eps / 2
        if scheme is not None:
            # a uniform number within ±1 has a root mean square of 1 / √3
            error = fp8_sum_error(scheme, columns, output.device)
            unit = math.hypot(unit, math.sqrt(3) * error)
        factor = 1.0 + (2.0 * drawn.to(output.device) - 1.0) * unit
        return (output.float() * factor).to(output.dtype)

    def one_rank(self) -> AbstractContextManager[None]:
        """Return a context within which layers use kernels of their own, as an engine of one rank
        multiplies.
        """
        return replaced(self, ranks=1, engine=None, keeps_kernels=False)

    def own_kernels(self) -> AbstractContextManager[None]:
        """Return a context within which layers use kernels of their own, not the engine's.

        Each kernel is freed after its use.
        """
        return replaced(self, engine=None, keeps_kernels=False)
