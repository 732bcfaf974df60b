"""What computing and loading cost on the papers' machines, fitted to what they print.

The papers print ratios. Loading is known: `io_s` (its two overheads are the fit of the model of
theory: T_load = bytes / bandwidth + 0.038 s + 0.117 s per 16k tokens of LongAlpaca-13B; of another
model in proportion to the bytes of its KV in 16 bits). So T_compute = T_load x comp / io, cell by
cell, without Cake's own time in it; `spread` says how well the bandwidths agree on it.

A step of k tokens at position p costs fixed + token * k + pair * (pairs of the step). At full
utilisation, for LongAlpaca-13B and 512 tokens, the sums are those of theory (`FULL`). Beside them:

- `fixed` from Table 4, which has six chunk sizes.
- Utilisation u: other users take 1 - u of the token budget of every step. The two numbers per step
  are fitted to the lengths that Table 5 has. (A step at the front then costs the same at every
  utilisation, within 6 %: so this is how the papers shared the device.)
- Other models: one length only, so the proportion of attention follows FLOPs: 4 h L per pair
  beside 2 x parameters per token.
"""

import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from sglang_cake.loading.cost_model import LoadCost, PrefillCost, pairs
from sglang_cake.simulator.machine import Machine

Cell = dict[str, Any]
PRINTED: dict[str, Any] = json.loads((Path(__file__).parent / "printed.json").read_text())
CHUNK = 512
BLOCK = 128
K = 1024
READ_S = 0.038
KIB = 1024
READ_S_PER_BYTE = 0.117 / (16 * K * 800 * KIB)  # of KV in 16 bits: what is stored is unpacked
# Seconds of a full step of 512 tokens of LongAlpaca-13B, and what each later one costs more.
FULL = {"A100": (0.0803, 0.00156), "2xA100": (0.0499, 0.00104), "H100": (0.0611, 0.00118)}
MODELS = {
    # KV bytes per token, hidden size, layers, parameters
    "LongAlpaca-7B": (512 * KIB, 4096, 32, 6.7e9),
    "LongAlpaca-13B": (800 * KIB, 5120, 40, 13.0e9),
    "Llama3.1-8B": (128 * KIB, 4096, 32, 8.0e9),
    "Llama3.1-70B": (320 * KIB, 8192, 80, 70.6e9),
}
BASE = "LongAlpaca-13B"


@dataclass(frozen=True, slots=True)
class Setting:
    """Where a cell was measured."""

    hardware: str = "A100"
    util: float = 1.0
    gbps: float = 32.0
    tokens: int = 16 * K
    model: str = BASE
    chunk: int = CHUNK
    bits: float = 16

    @classmethod
    def of(cls, cell: Cell, table: str) -> "Setting":
        """Of a cell of a printed table; what it does not say stands in the table's caption."""
        here = {"table4": "A100", "table6": "2xA100", "table7": "2xA100"}
        return cls(
            hardware=cell.get("hardware", here.get(table, "")).replace("1xA100", "A100"),
            util=cell.get("util", 1.0),
            gbps=cell["bw_gbps"],
            tokens=cell.get("ktokens", 16) * K,
            model=cell.get("model", BASE),
            chunk=cell.get("chunk", CHUNK),
            bits=cell.get("bits", 16),
        )

    @property
    def token_bytes(self) -> float:
        return MODELS[self.model][0] * self.bits / 16

    @property
    def read_s_per_token(self) -> float:
        """What reading costs beyond the link."""
        return READ_S_PER_BYTE * MODELS[self.model][0]

    @property
    def free_tokens(self) -> int:
        """Of a step's budget, what other users leave."""
        return round(self.chunk * self.util)


def io_s(setting: Setting) -> float:
    """Loading everything, without the step after it."""
    link_s = setting.tokens * setting.token_bytes / (setting.gbps * 1e9 / 8)
    return link_s + READ_S + setting.read_s_per_token * setting.tokens


@cache
def measured() -> dict[tuple[str, float, str, int], list[tuple[int, float]]]:
    """(hardware, util, model, chunk) -> (tokens, T_compute) of each printed cell."""
    found: dict[tuple[str, float, str, int], list[tuple[int, float]]] = {}
    for table in ("table3", "table4", "table5", "table6"):
        for cell in PRINTED[table]["cells"]:
            setting = Setting.of(cell, table)
            key = (setting.hardware, setting.util, setting.model, setting.chunk)
            took_s = io_s(setting) * cell["comp"] / cell["io"]
            found.setdefault(key, []).append((setting.tokens, took_s))
    return found


def compute_s(key: tuple[str, float, str, int], tokens: int) -> float:
    """Geometric mean over the bandwidths."""
    logs = [math.log(took_s) for length, took_s in measured()[key] if length == tokens]
    return math.exp(sum(logs) / len(logs))


def spread(model: str) -> float:
    """By how much the bandwidths disagree on a time to compute of that model, at most."""
    worst = 0.0
    for key, cells in measured().items():
        for tokens in {tokens for tokens, _ in cells if key[2] == model}:
            here = [took_s for length, took_s in cells if length == tokens]
            worst = max(worst, max(here) / min(here) - 1)
    return worst


def fitted_to(setting: Setting, table: str) -> int:
    """How many printed cells the time to compute of this one is fitted to, itself among them; 0: it
    is fitted to others alone."""
    if table == "table7":
        return 0
    key = (setting.hardware, setting.util, setting.model, setting.chunk)
    return len(measured()[key])


@cache
def fixed_share() -> float:
    """Of a full step of 512 tokens at the front, the part that does not depend on its tokens."""
    shares = []
    for model in ("LongAlpaca-7B", BASE):
        part = _attention_part("A100", model, 16 * K)
        rows, ones = [], []
        for chunk in (64, 128, 256, 512, 1024, 2048):
            took_s = (1 - part) * compute_s(("A100", 1.0, model, chunk), 16 * K)
            step_s = took_s / (16 * K / chunk)
            rows.append((1 / step_s, chunk / step_s))
            ones.append(1.0)
        (fixed_s, token_s), *_ = np.linalg.lstsq(np.array(rows), np.array(ones), rcond=None)
        shares.append(fixed_s / (fixed_s + CHUNK * token_s))
    return float(np.mean(shares))


def _attention_part(hardware: str, model: str, tokens: int) -> float:
    """Of a whole prompt's compute, the part that grows with the position."""
    first_s, more_s = FULL[hardware]
    _, hidden, layers, parameters = MODELS[model]
    _, base_hidden, base_layers, base_parameters = MODELS[BASE]
    scale = hidden * layers / parameters / (base_hidden * base_layers / base_parameters)
    kappa = more_s / (first_s - more_s / 2) * scale * tokens / CHUNK / 2
    return kappa / (1 + kappa)


@cache
def step_costs(hardware: str, util: float, model: str) -> tuple[float, float]:
    """Seconds of a step at the front, other users' part included, and of one of our pairs.

    Where nothing was printed: another utilisation costs as much per step, and a pair as much more
    as our part of a step is smaller (which is what the printed ones show); another GPU is as much
    faster as with LongAlpaca-13B.
    """
    first_s, more_s = FULL[hardware]
    if util == 1.0 and model == BASE:
        return first_s - more_s / 2, more_s / CHUNK**2
    key = (hardware, util, model, CHUNK)
    if key not in measured():
        if util != 1.0:
            step_s, pair_s = step_costs(hardware, 1.0, model)
            return step_s, pair_s / util
        faster = step_costs(hardware, 1.0, BASE)[0] / step_costs("A100", 1.0, BASE)[0]
        step_s, pair_s = step_costs("A100", 1.0, model)
        return step_s * faster, pair_s * faster
    lengths = sorted({tokens for tokens, _ in measured()[key]})
    steps = {tokens: _full_steps(tokens, round(CHUNK * util)) for tokens in lengths}
    if len(lengths) == 1:
        tokens, part = lengths[0], _attention_part(hardware, model, lengths[0])
        total_s = compute_s(key, tokens)
        return total_s * (1 - part) / steps[tokens], total_s * part / pairs(0, tokens)
    rows, ones = [], []
    for tokens in lengths:
        took_s = compute_s(key, tokens)
        rows.append((steps[tokens] / took_s, pairs(0, tokens) / took_s))
        ones.append(1.0)
    (step_s, pair_s), *_ = np.linalg.lstsq(np.array(rows), np.array(ones), rcond=None)
    return float(step_s), float(pair_s)


def _full_steps(tokens: int, free_tokens: int) -> float:
    """As many full steps cost as much, attention aside: the last one may be smaller."""
    count = math.ceil(tokens / free_tokens)
    held = (tokens + count * (CHUNK - free_tokens)) / CHUNK
    return fixed_share() * count + (1 - fixed_share()) * held


def prefill_cost(setting: Setting) -> PrefillCost:
    """Of one step of the machine, other users' part included."""
    step_s, pair_s = step_costs(setting.hardware, setting.util, setting.model)
    fixed_s = fixed_share() * step_s
    if setting.chunk == CHUNK:
        return PrefillCost(fixed_s, (step_s - fixed_s) / CHUNK, pair_s)
    # Table 4: full utilisation; the fixed part is that of 512, attention keeps its share.
    total_s = compute_s((setting.hardware, 1.0, setting.model, setting.chunk), setting.tokens)
    part = _attention_part(setting.hardware, setting.model, setting.tokens)
    token_s = total_s * (1 - part) / setting.tokens - fixed_s / setting.chunk
    return PrefillCost(fixed_s, token_s, total_s * part / pairs(0, setting.tokens))


def machine(setting: Setting) -> Machine:
    """The simulated machine of a setting."""
    block_s = BLOCK * (setting.token_bytes / (setting.gbps * 1e9 / 8) + setting.read_s_per_token)
    taken = setting.chunk - setting.free_tokens
    return Machine(
        prefill_cost(setting),
        LoadCost(READ_S, block_s),
        others=(lambda step: taken) if taken else None,
    )
