"""How far apart two computations of the same numbers may be, on any chip.

A kernel chooses its order of addition by the chip, by the shape and by the number of rows, and every order
rounds differently. So a limit that fits what one chip gave is wrong on the next. These follow from the dtype
and from the depth alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from speculon.runtimes.torch.model.compare import difference

# Roundings by which a layer may move its largest value. In fp32 each of the 32 to 256 additions of a product
# rounds: after the 12 layers of a round of Gemma 4's assistant, 16 for each were seen on an Intel Xeon with
# AMX, and 3 on an AMD EPYC. Kernels for coarser dtypes add in fp32, and round the results alone.
OF_A_LAYER = {torch.float32: 64, torch.bfloat16: 4, torch.float16: 4}


def rounding(layers: int, dtype: torch.dtype = torch.float32) -> float:
    """What other orders of addition may change after so many layers, as a share of the largest value.

    A product or a norm alone counts as a layer.
    """
    return OF_A_LAYER[dtype] * layers * torch.finfo(dtype).eps


def assert_near(found: Tensor, expected: Tensor, layers: int = 1) -> None:
    """That both are the same up to the rounding of so many layers."""
    assert found.shape == expected.shape
    off, limit = difference(found.detach(), expected.detach()), rounding(layers, found.dtype)
    assert off <= limit, (
        f"off by {off:.1e} of the largest value; after {layers} layers {limit:.1e} is rounding"
    )
