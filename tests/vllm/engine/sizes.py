# SPDX-License-Identifier: Apache-2.0
"""Owns the sizes at which a small GPU pool is in want and an ample one is not."""

from __future__ import annotations

from dataclasses import dataclass

from engine.models import TOP_K
from engine.workload import Scale


@dataclass(frozen=True)
class Sizes:
    """Of the engines that serve one model.

    Args:
        scale: of the workload.
        small: GPU blocks that hold it only with pages given up and requests preempted.
        ample: GPU blocks that hold everything.
        returning: GPU blocks with room for one request beyond twice the watermark, and not for
            five.
        hot_rows: of a request's hot region.
        max_model_len: longest request in tokens.
    """

    scale: Scale
    small: int
    ample: int
    returning: int
    hot_rows: int
    max_model_len: int


def sizes_for(model: str, mtp: int) -> Sizes:
    """A page takes a GPU block in each resident group and one for the indexers; a DeepSeek-shaped
    layer is a group of its own, a GLM-shaped index group too, and so is the draft layer. With
    drafts, hot regions hold the rows of all verification rows, and only longer contexts are larger.
    """
    if not mtp:
        small = {"deepseek-v3.2": 3100, "glm-5.2": 2250}[model]
        returning = {"deepseek-v3.2": 4600, "glm-5.2": 2250}[model]
        return Sizes(Scale(), small, 9000, returning, 3072, 10_240)
    groups = {"deepseek-v3.2": 9, "glm-5.2": 6}[model]
    scale = Scale(prompt=14_000)
    pages = (scale.prompt + 6 * scale.spread) // 64
    hot_rows = (1 + mtp) * TOP_K
    # Three requests and a half that have given up all they can.
    small = int(3.5 * (groups * hot_rows // 64 + pages + 2 * groups))
    return Sizes(scale, small, 8 * (groups + 1) * pages, 0, hot_rows, 17_408)
