"""How many tokens to draft next. A policy sees outlooks and past steps, never a drawn token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from math import inf

from dflash.core.books import Books
from dflash.core.profile import Profile, Survival
from dflash.core.types import PLAIN_STEP, Outlook, Plan, Step


class Fixed:
    """Always the same block, or what is left of it at the end of the output."""

    def __init__(self, block_size: int, tree: int = 0) -> None:
        """``block_size`` counts the anchor: 1 is plain decoding.

        Drafts that can spread ``tree`` nodes over it, where that is more than a chain has.
        """
        assert block_size >= 1, f"a block has at least its anchor, got {block_size}"
        self._rows, self._tree = block_size - 1, tree
        self.fallback_rounds = 0
        self.fallback_reason: str | None = None  # of rounds for which the whole block is too short

    def plan(self, most: int, outlooks: Sequence[Outlook]) -> Plan:
        """The first draft that can propose, as deep as block, draft and output allow."""
        for draft, outlook in enumerate(outlooks):
            rows = min(self._rows, most, outlook.most)
            if rows >= outlook.least:
                return Plan(draft, max(rows, min(self._tree, outlook.tree)), rows)
            if self._rows < outlook.least <= outlook.most:
                self.fallback_rounds += 1
                self.fallback_reason = (
                    f"a block of {self._rows + 1} has room for {self._rows} drafted tokens, and "
                    f"draft_n_min wants {outlook.least}"
                )
        return PLAIN_STEP

    def observe(self, step: Step) -> None:
        """Nothing to learn."""


class Off:
    """Plain decoding: one token a pass."""

    def plan(self, most: int, outlooks: Sequence[Outlook]) -> Plan:  # noqa: ARG002 - the protocol
        """Never a draft."""
        return PLAIN_STEP

    def observe(self, step: Step) -> None:
        """Nothing to learn."""


class State(StrEnum):
    """Where a request stands."""

    PREFILL = "prefill"  # nothing decided yet
    SPECULATING = "speculating"  # drafting is the fastest known way on
    FALLBACK = "fallback"  # plain steps, and a probe now and then
    DONE = "done"


_FALLBACK = State.FALLBACK  # asked for once: in Python 3.11 a member is a call
_PATIENCE, _MOST_PATIENCE = 25, 800  # plain steps per plain step that a probe may lose; doubles
_FORGET = 0.3  # what failures before a successful probe still count
_WORTH_IT = 0.95  # of plain decoding's speed; a little less is the price of noticing more
_SURE, _GOOD = 0.9, 0.8  # of its first token: for a probe and more credit; for a first block
_NEAR = 0.93  # sizes never measured are tried when they look at least this good
_TRY_EVERY = 4  # rounds
_FIRST = 3  # rows of the first block of a pair
_MEASURED = 2  # times, before a cost is believed
_REST = 16  # plain steps of a fallback after which all is looked at again, if not before

TOO_SHORT = "the text was too short to time plain steps and draft"
Options = Mapping[tuple[int, int], float]  # (draft, rows) -> speed; plain decoding is 1


class Adaptive:
    """The block that commits most tokens per second, chosen anew each round; 1 is plain decoding.

    For r drafts it expects ``committed(r) / cost(r)`` tokens a second, with costs measured in
    rounds and survival counted in this request. Its books bound what drafts that fail may take.
    """

    def __init__(
        self, block_size: int, profile: Profile | None = None, trees: Sequence[int] = ()
    ) -> None:
        """``block_size`` is the most, anchor included; ``trees`` are numbers of nodes to try as
        well, at full depth. Requests of a pair share a ``profile``."""
        self.state = State.PREFILL
        self.fallback_rounds = 0  # probes included
        self.fallback_reason: str | None = None  # of the last time
        self._most, self._trees = block_size - 1, tuple(trees)
        self._profile = profile or Profile()
        self._costs = self._profile.costs
        self._survival: dict[tuple[int, int], Survival] = {}
        self._books = Books()
        self._rounds = self._plain_run = 0
        self._patience, self._again = _PATIENCE, False
        self._silent = set[int]()  # drafts that proposed nothing when they were asked
        self._unable = False  # in a round with time and room for a block
        self._rest, self._asked = 0.0, [(0, 0)]  # plain steps of the run; what drafts said then
        self._outlook = Outlook(0)  # of the draft last chosen

    def plan(self, most: int, outlooks: Sequence[Outlook]) -> Plan:
        """The best block by what is known now. Looks at nothing that was drawn."""
        self._rounds += 1
        self._books.left = most
        asked = [(outlook.most, outlook.grade) for outlook in outlooks]
        if self._plain_run < self._rest and asked == self._asked:
            return PLAIN_STEP  # no probe is due, and the drafts say what they said
        able = {d: min(o.most, most, self._most) for d, o in enumerate(outlooks)}
        able = {draft: rows for draft, rows in able.items() if rows >= outlooks[draft].least}
        if self._costs.count(0, 0) < _MEASURED:
            return PLAIN_STEP  # the first steps of a pair measure plain decoding
        if not able:
            self._unable |= all(min(o.most, self._most) < o.least for o in outlooks)
            return PLAIN_STEP
        self._asked = asked
        for draft in able:
            self._profile.rested(draft, bool(outlooks[draft].prior))
        draft, rows = self._unmeasured(able, outlooks) or self._best(able, outlooks)
        if rows == 0:
            return PLAIN_STEP
        self._outlook = outlooks[draft]
        return Plan(draft, rows, min(rows, able[draft]))

    @property
    def idle_reason(self) -> str:
        """Why nothing was drafted, if nothing was."""
        if self.fallback_reason is not None:
            return self.fallback_reason
        return "no draft had anything to propose" if self._unable or self._silent else TOO_SHORT

    def observe(self, step: Step) -> None:
        """Learn what the round cost and how far the draft was right."""
        self.fallback_rounds += self.state is _FALLBACK
        if step.rows:
            self._learn(step)
        else:
            # The first plain step after a block may pay for what the block's commit put off.
            # A draft that proposed nothing after all took its time, so that is no plain step.
            if (self._plain_run or self._rounds == 1) and not step.plan.rows:
                self._costs.add(0, 0, step.ns)
                self._profile.refresh()
            if step.plan.rows:
                self._lose(step)
            self._plain_run += 1
        self._books.tokens += len(step.tokens)
        self._profile.rounds += 1
        if step.finish is not None:
            self.state = State.DONE

    def _unmeasured(
        self, able: Mapping[int, int], outlooks: Sequence[Outlook]
    ) -> tuple[int, int] | None:
        """A draft's first blocks. One that said nothing before is asked as the books allow."""
        for draft, most in able.items():
            outlook = outlooks[draft]
            prior = outlook.prior  # such a draft is in the books from its second block on
            unsure = prior and prior[0] < _GOOD
            once = prior or self._lagging(outlook)  # one that catches up would not be measured
            if unsure or self._costs.seen(draft) >= (1 if once else _MEASURED):
                continue
            if draft not in self._silent or self._room(draft, outlook) >= 1:
                return draft, min(most, max(_FIRST, outlook.least))
        return None

    def _best(self, able: Mapping[int, int], outlooks: Sequence[Outlook]) -> tuple[int, int]:
        able = {draft: most for draft, most in able.items() if self._costs.seen(draft)}
        speeds = {**self._speeds(able, outlooks), **self._tree_speeds(able, outlooks)}
        speeds = {key: speed for key, speed in speeds.items() if key[1] >= outlooks[key[0]].least}
        promise = max((s for (d, _), s in speeds.items() if not outlooks[d].prior), default=1.0)
        self._books.promise(promise)
        hopes = {d: max(s for (e, _), s in speeds.items() if e == d) for d, _ in speeds}
        rooms = {d: self._room(d, outlooks[d], hope) for d, hope in hopes.items()}
        wanting = {key: self._costs.price(*key) - rooms[key[0]] for key in speeds}
        options = {key: speed for key, speed in speeds.items() if wanting[key] <= 0}
        if not options:  # the books allow nothing, until so many plain steps have filled them
            self._fall_back(self._books.reason)
            wait = self._books.wait(min(wanting.values(), default=0.0))
            self._rest = self._plain_run + int(min(wait, _REST))
            return 0, 0
        best = max(options, key=options.__getitem__)
        if options[best] <= _WORTH_IT:
            return self._probe(options, able, outlooks)
        self.state = State.SPECULATING
        if self._profile.outdated(options[best] - 1):
            return 0, 0  # until one is measured, which the first after a block is not
        return self._untried(options, options[best]) or best

    def _fall_back(self, reason: str) -> None:
        self.state, self.fallback_reason = State.FALLBACK, reason

    def _probe(
        self, options: Options, able: Mapping[int, int], outlooks: Sequence[Outlook]
    ) -> tuple[int, int]:
        """Now and then the best; of drafts that know how sure they are, where they are sure."""
        self._fall_back("no block looked faster than a plain step")
        tried = [key for key in options if not (p := outlooks[key[0]].prior) or p[0] >= _SURE]
        best = max(tried, key=options.__getitem__, default=(0, 0))
        wait = self._until(best, able[best[0]], outlooks[best[0]]) if tried else inf
        self._rest = min(wait, self._plain_run + _REST)
        return best if self._plain_run >= wait else (0, 0)

    def _until(self, probe: tuple[int, int], most: int, outlook: Outlook) -> float:
        """Plain steps in a row before a probe: the dearer and the more in vain, the more, and more
        still where even drafts that are always right would hardly pay."""
        costs = self._costs.curve(probe[0], most)
        loss = self._costs.cost(*probe) / costs[0] - 1
        loss += self._lagging(outlook) * self._profile.catch_up(probe[0]).guess
        hope = max((rows + 1) * costs[0] / costs[rows] for rows in range(1, most + 1)) - 1
        if self._again:
            return 0.0
        return self._patience * loss / min(1.0, hope) if hope > 0 else inf

    def _speeds(self, able: Mapping[int, int], outlooks: Sequence[Outlook]) -> Options:
        speeds: dict[tuple[int, int], float] = {}
        for draft, most in able.items():
            gains = self._survival_of(draft, outlooks[draft]).committed(most)
            costs = self._costs.curve(draft, most)
            speeds |= {(draft, r): gains[r] * costs[0] / costs[r] for r in range(1, most + 1)}
        return speeds

    def _tree_speeds(self, able: Mapping[int, int], outlooks: Sequence[Outlook]) -> Options:
        """The same for trees; rows that a chain has too are a chain's."""
        speeds: dict[tuple[int, int], float] = {}
        for draft, most in able.items():
            for nodes in (n for n in self._trees if most < n <= outlooks[draft].tree):
                more = self._profile.lift(draft).more(nodes)
                gain = self._survival_of(draft, outlooks[draft]).committed(most, more)[most]
                speeds[draft, nodes] = gain * self._costs.plain() / self._costs.cost(draft, nodes)
        return speeds

    def _untried(self, options: Options, best: float) -> tuple[int, int] | None:
        """Now and then a size whose cost is a guess, where the guess is good."""
        if self._rounds % _TRY_EVERY:
            return None
        new = [key for key in options if not self._costs.knows(*key)]
        new = [key for key in new if options[key] > _NEAR * best]
        return max(new, key=options.__getitem__, default=None)

    def _room(self, draft: int, outlook: Outlook, speed: float = 1.0) -> float:
        """Plain steps that a block which looks so fast may take."""
        graded = bool(outlook.prior)
        sure = graded and self._survival_of(draft, outlook).chances(1)[0] >= _SURE
        room = self._books.room(speed if graded else None, sure)
        return room - self._late(draft, outlook)

    def _learn(self, step: Step) -> None:
        draft = step.plan.draft
        kept, judged = len(step.verdict.path), min(step.verdict.drafted, step.plan.depth)
        survival, more = self._survival_of(draft, self._outlook), 0.0
        if step.plan.is_tree and step.verdict.drafted > judged:
            lift = self._profile.lift(draft)
            more = lift.more(step.verdict.drafted)
            lift.add(survival.chances(judged), kept, step.verdict.drafted)
        survival.add(judged, kept, more)
        self._usual_of(draft, self._outlook).add(judged, kept, more)
        if self.state is State.FALLBACK:
            self._again = kept > 0
            self._patience = _PATIENCE if kept else min(2 * self._patience, _MOST_PATIENCE)
            if kept:
                survival.relax(_FORGET)
        self._plain_run, self._rest = 0, 0.0
        new, late = not self._costs.seen(draft), self._lagging(self._outlook)
        price = self._profile.block(draft, step.rows, step.ns, late)
        if new and not self._outlook.prior and price <= survival.committed(step.rows)[-1]:
            return  # a measurement, and in nobody's books
        self._books.spend(price, len(step.tokens))

    def _lose(self, step: Step) -> None:
        """Book the time of a draft that proposed nothing after all."""
        draft, spent = step.plan.draft, self._costs.steps(step.ns)
        self._silent.add(draft)
        if self._costs.seen(draft):  # a disturbance is no debt
            spent = min(spent, self._costs.price(draft, step.plan.rows) + 1)
        self._books.spend(spent, 1)

    def _late(self, draft: int, outlook: Outlook) -> float:
        """Plain steps that catching up takes."""
        return self._lagging(outlook) * self._profile.catch_up(draft).typical

    def _lagging(self, outlook: Outlook) -> int:
        """Rows to catch up, beyond what every round has of them."""
        return outlook.lag if outlook.lag > self._most + 1 else 0

    def _usual_of(self, draft: int, outlook: Outlook) -> Survival:
        return self._profile.usual(draft, outlook.grade, outlook.prior)

    def _survival_of(self, draft: int, outlook: Outlook) -> Survival:
        key = (draft, outlook.grade)
        if key not in self._survival:
            usual = self._usual_of(draft, outlook)
            self._survival[key] = Survival(usual.chances(max(1, self._most)))
        return self._survival[key]
