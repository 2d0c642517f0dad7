"""What all low-bit layers of one model share, in one object that each is given when it is built."""

from contextlib import AbstractContextManager
from enum import Enum

import torch

from qarl.quant.kernels import KernelFactory, make_factory
from qarl.quant.layers.gradients import Gradients
from qarl.quant.runtime.replaced import replaced
from qarl.quant.schemes import SchemeError


class Forward(Enum):
    """What a forward multiplies. LEARNER: what is learned by: the codes of an aligned learner, else
    its masters in its compute dtype. PUBLISHED: the codes, in the engine's dtype. UNQUANTIZED: the
    masters, cast to the engine's dtype.
    """

    LEARNER = "learner"
    PUBLISHED = "published"
    UNQUANTIZED = "unquantized"


class LayerContext:
    """How the layers of one model compute.

    dtype: the engine's compute dtype: of activations, embeddings, norms, and of the scales that are
    published. kernel: family of the products of codes, one of `quant.kernels.KERNELS`. aligned:
    whether the learner multiplies those codes (True), or its masters cast to the compute dtype
    (False, the plain quantized-rollout baseline; codes are still made for publishing).
    compute_dtype: what an unaligned forward computes in; None: `dtype`. gradients: how the backward
    makes the masters'. checkpointing: whether decoder layers keep nothing but their input for the
    backward. engine: the running engine's own layers, to multiply with instead of `kernel`'s; they
    hold each version before it is used. keeps_codes: cache codes per version; if False, recompute
    them at every use (slower, less memory). keeps_products: the same of what layers' own kernels
    multiply, the codes in a layout of theirs. kv_cache: "fp8" where keys and values are cached in
    e4m3, None in `dtype`; forwards of codes read the same. device: where codes are made and
    multiplied, None where the masters are (`quant.checkpoint.load.matrices_on_host`).

    Raises `SchemeError` for an aligned learner with a compute dtype of its own, `KernelError` for a
    kernel that cannot run here.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        kernel: str,
        aligned: bool = True,
        compute_dtype: torch.dtype | None = None,
        kv_cache: str | None = None,
        device: torch.device | None = None,
    ):
        if aligned and compute_dtype not in (None, dtype):
            raise SchemeError(
                f"an aligned learner multiplies the engine's codes in the engine's dtype, {dtype},"
                f" not {compute_dtype}; leave the compute dtype out, or set aligned false"
            )
        self.dtype = dtype
        self.compute_dtype = compute_dtype or dtype
        self.kernel = kernel
        self.aligned = aligned
        self.kv_cache = kv_cache
        self.device = device
        self.gradients = Gradients()
        self.checkpointing = False
        self.engine: KernelFactory | None = None
        self.keeps_products = True
        self.keeps_codes = True
        self._own = make_factory(kernel, dtype)
        self.forward = Forward.LEARNER
        self._roundings: torch.Generator | None = None

    def drop_codes(self) -> None:
        """Have layers make a version's codes again at every use."""
        self.keeps_codes = False

    def drop_products(self) -> None:
        """Have layers prepare their kernels again at every use."""
        self.keeps_products = False

    def multiply_with(self, engine: KernelFactory | None) -> None:
        """Multiply with the running engine's own layers, or again with `kernel`'s (None)."""
        self.engine = engine

    def checkpoint(self, checkpointing: bool) -> None:
        """Have decoder layers keep nothing but their input for the backward, or everything."""
        self.checkpointing = checkpointing

    @property
    def factory(self) -> KernelFactory:
        """Makes the layers' products."""
        return self.engine or self._own

    @property
    def multiplies_codes(self) -> bool:
        """Whether this forward multiplies what is published."""
        return self.forward is Forward.PUBLISHED or (
            self.aligned and self.forward is Forward.LEARNER
        )

    @property
    def forward_dtype(self) -> torch.dtype:
        """Of what a layer's forward is given and returns."""
        return self.compute_dtype if self.forward is Forward.LEARNER else self.dtype

    def forward_as(self, forward: Forward) -> AbstractContextManager[None]:
        """Within this context every layer multiplies that."""
        return replaced(self, forward=forward)

    def other_roundings(self, seed: int) -> AbstractContextManager[None]:
        """Within this context every product's results are moved at random, by up to one unit in
        their last place: what another right implementation may give, which adds up in another
        order.
        """
        return replaced(self, _roundings=torch.Generator().manual_seed(seed))

    def rounded(self, product: torch.Tensor) -> torch.Tensor:
        """Return a product's results as they are, or moved where `other_roundings` says so."""
        if self._roundings is None:
            return product
        moves = torch.rand(product.shape, generator=self._roundings, dtype=torch.float32).to(
            product.device
        )
        # of a value between 1 and 2, half of which rounds away
        unit = torch.finfo(product.dtype).eps / 2
        return (product.float() * (1.0 + (2.0 * moves - 1.0) * unit)).to(product.dtype)

    def own_products(self) -> AbstractContextManager[None]:
        """Within this context layers multiply with kernels of their own, not the engine's, each
        gone after its use.
        """
        return replaced(self, engine=None, keeps_products=False)
