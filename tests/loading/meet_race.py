"""A race of compute against a loader, played at random, for models with and without end states."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from sglang_cake.loading.cost_model import LoadCost, PrefillCost, PromptCosts
from sglang_cake.loading.meet import BlockState, Meet
from sglang_cake.loading.planner import LoadProgress, Mode, StepPlan, next_step


def costs(fixed_s: float, token_s: float, block_s: float) -> PromptCosts:
    return PromptCosts(
        PrefillCost(fixed_s, token_s, 0.0, error=0.0), LoadCost(0.0, block_s, error=0.0)
    )


COSTS = [
    costs(0, 1, 1),
    costs(1, 1, 0),
    costs(1, 1, 50),
    costs(9, 9, 1),
    costs(9, 1, 1),
    costs(0, 1, 1e6),
]


def plan(
    meet: Meet,
    chunk: int,
    known: PromptCosts = COSTS[0],
    since_s: float = 0.0,
    mode: Mode = "both",
) -> StepPlan:
    """`next_step` of a settled meet."""
    return next_step(
        meet.view(),
        mode=mode,
        chunk_tokens=chunk,
        costs=known,
        progress=LoadProgress(since_s, since_s > 0, load_from=0),
    )


class MeetRace(RuleBasedStateMachine):
    """A prompt with every token's history kept beside the meet, by whoever drives it.

    A subclass begins the race, and has the steps and rules in which models differ.
    """

    page: int
    block: int
    prompt: int
    chunk: int
    meet: Meet

    def start(
        self, page: int, pages: int, prompt: int, chunk: int, short: int, device: float, **more: int
    ) -> None:
        """Begin. Args: more: of `Meet`."""
        self.page, self.block, self.prompt = page, page * pages, prompt
        self.chunk = -(-chunk // page) * page
        front = self.page_floor(int(device * (prompt - 1)))
        self.meet = Meet(
            block_tokens=self.block,
            page_tokens=page,
            limit_tokens=max(0, prompt - short),
            prompt_tokens=prompt,
            front=front,
            **more,
        )
        self.found = False
        self.loading: set[int] = set()  # what the loader may still bring
        self.bytes_here: set[int] = set()  # landed blocks whose bytes somebody holds
        # What each token got since it was last taken away: "tree", "computed" or "attached".
        self.got = ["tree"] * front + [""] * (prompt - front)

    def page_floor(self, token: int) -> int:
        return token // self.page * self.page

    def cover(self, start: int, stop: int, how: str) -> None:
        assert not any(self.got[start:stop]), "a token was got twice"
        self.got[start:stop] = [how] * (stop - start)

    def front_of_tokens(self) -> int:
        return self.got.index("") if "" in self.got else self.prompt

    def attach(self) -> None:
        """Attach every island at the front."""
        raise NotImplementedError

    def claim(self, stop: int) -> None:
        """Compute up to there."""
        raise NotImplementedError

    def passed(self, front: int) -> None:
        """The tree has the tokens up to there, without a step."""
        raise NotImplementedError

    @precondition(lambda self: self.meet.front < self.prompt)
    @rule(
        known=st.sampled_from(COSTS),
        since_s=st.sampled_from([0.0, 1.0, 100.0]),
        mode=st.sampled_from(["auto", "both"]),
    )
    def step(self, known: PromptCosts, since_s: float, mode: Mode) -> None:
        self.attach()
        if self.meet.front == self.prompt:
            return
        step = plan(self.meet, self.chunk, known, since_s, mode)
        if not step.wait:
            self.claim(step.stop)

    @rule(share=st.floats(0, 1))
    def tree_grows(self, share: float) -> None:
        front = self.page_floor(self.meet.front + int(share * (self.prompt - self.meet.front)))
        if front > self.meet.front:
            self.passed(front)
            self.got[:front] = ["tree"] * front

    @precondition(lambda self: self.loading)
    @rule()
    def land_the_last(self) -> None:
        self.land_block(max(self.loading))

    @precondition(lambda self: self.loading)
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        self.land_block(data.draw(st.sampled_from(sorted(self.loading))))

    def land_block(self, b: int) -> None:
        self.loading.remove(b)
        wanted = self.meet.state(b) is BlockState.WANTED
        assert self.meet.landed(b) is wanted
        if wanted:
            self.bytes_here.add(b)

    @rule(share=st.floats(0, 1))
    def tree_shrinks(self, share: float) -> None:
        front = self.page_floor(int(share * self.meet.front))
        if front == self.meet.front:
            return
        assert self.meet.advance(front) == []
        self.got[front:] = [""] * (self.prompt - front)

    def teardown(self) -> None:
        """Drive to the end: the loader falls silent, compute goes on."""
        if not hasattr(self, "meet"):
            return
        bound = 2 * self.prompt + 2
        while self.meet.front < self.prompt:
            bound -= 1
            assert bound > 0, "no progress"
            self.attach()
            if self.meet.front < self.prompt:
                step = plan(self.meet, self.chunk, since_s=1e9)
                assert not step.wait
                self.claim(step.stop)
        assert "" not in self.got
        assert not self.meet.pending
        assert self.meet.island() is None
        assert all(b * self.block >= self.meet.limit for b in self.bytes_here)
