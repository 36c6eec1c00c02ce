# SPDX-License-Identifier: Apache-2.0
"""Owns the flags that several commands share: the machine, its engine, how an answer is given."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ModelName = Annotated[
    str, typer.Option("--model", help="Model name, or a config.json or its folder.")
]
GpuName = Annotated[
    str | None, typer.Option("--gpu", help="H100, H200, B200, B300, GH200 or RTX-PRO-6000.")
]
HbmGib = Annotated[float | None, typer.Option(help="Memory of one GPU.")]
WeightsGib = Annotated[float | None, typer.Option(help="Weights of one replica.")]
KvDtype = Annotated[str, typer.Option(help="fp8_ds_mla or bf16.")]
BlockSize = Annotated[int, typer.Option(help="Tokens of a block.")]
HotRows = Annotated[int | None, typer.Option(help="Hot rows of a request; (mtp + 2) x top-k.")]
Mtp = Annotated[int, typer.Option(help="Speculative tokens.")]
HostLayoutName = Annotated[str, typer.Option(help="Host pool: row_interleaved or layer_major.")]
LinkGbps = Annotated[float | None, typer.Option(help="Host link of one GPU, one direction.")]
GpuMemoryUtilization = Annotated[float, typer.Option(help="As for the engine.")]
RuntimeGib = Annotated[
    float, typer.Option(help="What an engine takes of a GPU beside weights and KV.")
]
KvGib = Annotated[float | None, typer.Option(help="KV memory of one GPU as an engine printed it.")]
BatchedTokens = Annotated[int | None, typer.Option(help="The engine's max_num_batched_tokens.")]
MaxNumSeqs = Annotated[int | None, typer.Option(help="As for the engine.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
AsCsv = Annotated[bool, typer.Option("--csv", help="Print CSV.")]
PlotFile = Annotated[Path | None, typer.Option(help="Draw to this .png, .svg or .pdf.")]
