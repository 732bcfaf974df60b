"""What a simulation is given, and what it says happened."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request.

    Attributes:
        stored_blocks: so many of its first full blocks are stored; None: all.
        new_tokens: to generate; the first one ends the prefill.
    """

    prompt_tokens: int
    arrive_s: float = 0.0
    stored_blocks: int | None = None
    new_tokens: int = 1
    rid: str = ""


@dataclass(frozen=True, slots=True)
class Lap:
    """A prompt's part of one step: tokens `[start, stop)` at `[begin_s, end_s)`."""

    start: int
    stop: int
    begin_s: float
    end_s: float


@dataclass(slots=True)
class Race:
    """What happened to one prompt; times are the clock's.

    Attributes:
        overlapped_tokens: of those loaded, what came while the last step ran.
        waited_s: its turn came and it waited for its loads instead of computing.
        landings: (when, block), discarded ones included.
    """

    prompt: Prompt
    first_token_s: float = 0.0
    finish_s: float = 0.0
    computed_tokens: int = 0
    loaded_tokens: int = 0
    overlapped_tokens: int = 0
    wasted_blocks: int = 0
    waited_s: float = 0.0
    laps: list[Lap] = field(default_factory=list)
    landings: list[tuple[float, int]] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.prompt.arrive_s

    @property
    def kv_s(self) -> float:
        """From arrival until the KV of all tokens was there that could be loaded.

        Papers that time the loading of a cache stop here: the step over the rest comes after it.
        """
        if not self.loaded_tokens:
            return self.ttft_s
        last = self.laps[-1]
        before = [lap.end_s for lap in self.laps if lap.stop < last.stop]
        return max(0.0, *before, *(when_s for when_s, _ in self.landings)) - self.prompt.arrive_s


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of the device, and how its tokens are shared out."""

    begin_s: float
    end_s: float
    decodes: int
    plain_tokens: int  # of prompts of which nothing was stored
    stored_tokens: int  # computed for prompts of which something was stored
    other_tokens: int = 0
