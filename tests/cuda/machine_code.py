"""What machine code does, read from its instructions: loops, barriers, what a step costs.

Instructions of `tests.cuda.disassembly.sass` are of 16 bytes each; a branch names the address it goes to.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from tests.cuda.disassembly import Declared, declared, opcode

A_BYTES = 128 * 64 * 2
"""Of a tile's rows in a step."""

TENSOR_CYCLES = 1024
"""Of the products of a step of 64 of the reduction: 8 of 64 x 256 x 16, 128 cycles each."""
WARPS_A_SCHEDULER = 2
"""Of the eight that multiply."""
TENSOR_CYCLES_IN_TURNS = 512
"""The cycles of a step's products if two warpgroups take turns: 8 products of 64 x 128 x 16 take 64 each.

One warp of a scheduler multiplies, and the other stores.
"""

BOX_BYTES = {  # that the accelerator loads, by the form of the product and the dimensions of the map
    ("forward", "2D"): 128 * 128,
    ("forward", "3D"): 128 * 128,
    ("input", "2D"): 128 * 128,
    ("input", "3D"): 64 * 128,
    ("weight", "2D"): 64 * 128,
}


def is_predicated(instruction: str) -> bool:
    return instruction.startswith("@")


def _target(instruction: str) -> int | None:
    """Which instruction a branch goes to."""
    if not opcode(instruction).startswith("BRA"):
        return None
    return int(re.findall(r"0x[0-9a-f]+", instruction)[-1], 16) // 16


@dataclass(frozen=True)
class Code:
    """One kernel's instructions, and their flow of control by blocks. A call goes on behind itself."""

    code: Sequence[str]

    @cached_property
    def begins(self) -> list[int]:
        """The first instruction of each block."""
        found = {0}
        for index, each in enumerate(self.code):
            target = _target(each)
            if target is not None:
                found |= {target, index + 1}
            elif opcode(each).split(".")[0] in ("EXIT", "RET"):
                found.add(index + 1)
        return sorted(index for index in found if index < len(self.code))

    @cached_property
    def successors(self) -> list[list[int]]:
        """By block, the numbers of those that may follow it."""
        number = {begin: i for i, begin in enumerate(self.begins)}
        found = []
        for i in range(len(self.begins)):
            last = self.code[self.end(i) - 1]
            target = _target(last)
            follows = [] if target is None else [number[target]]
            ends = target is not None or opcode(last).split(".")[0] in ("EXIT", "RET")
            goes_on = not ends or is_predicated(last) or ".DIV" in opcode(last)
            if goes_on and i + 1 < len(self.begins):
                follows.append(i + 1)
            found.append(follows)
        return found

    def end(self, block: int) -> int:
        return self.begins[block + 1] if block + 1 < len(self.begins) else len(self.code)

    @cached_property
    def predecessors(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in self.begins]
        for block, follows in enumerate(self.successors):
            for each in follows:
                found[each].append(block)
        return found

    @cached_property
    def _dominators(self) -> dict[int, int]:
        """By reachable block, a bit for every block that each way to it leads through."""
        everything = (1 << len(self.begins)) - 1
        order, seen, stack = [], {0}, [(0, iter(self.successors[0]))]
        while stack:
            block, rest = stack[-1]
            following = next((each for each in rest if each not in seen), None)
            if following is None:
                order.append(block)
                stack.pop()
            else:
                seen.add(following)
                stack.append((following, iter(self.successors[following])))
        found = dict.fromkeys(order, everything) | {0: 1}
        changed = True
        while changed:
            changed = False
            for block in reversed(order):
                if block == 0:
                    continue
                meet = everything
                for before in self.predecessors[block]:
                    meet &= found.get(before, everything)
                changed |= found[block] != meet | 1 << block
                found[block] = meet | 1 << block
        return found

    @cached_property
    def loops(self) -> list[set[int]]:
        """The blocks of every loop: of each way back to a block that all ways into the loop lead through."""
        found = []
        for block, dominators in self._dominators.items():
            for head in self.successors[block]:
                if not dominators >> head & 1:
                    continue
                body, rest = {head}, [block]
                while rest:
                    each = rest.pop()
                    if each not in body:
                        body.add(each)
                        rest += self.predecessors[each]
                found.append(body)
        return sorted(found, key=len)

    def is_back(self, block: int, following: int) -> bool:
        """Whether each way to ``block`` leads through the block that follows it: the end of a loop."""
        return bool(self._dominators[block] >> following & 1)

    def instructions(self, blocks: set[int]) -> list[str]:
        return [each for block in sorted(blocks) for each in self.code[self.begins[block] : self.end(block)]]

    def is_rare(self, block: int) -> bool:
        """Whether the block ends with the question if a float's size is extreme."""
        *before, last = self.instructions({block})
        predicate = last.split()[0].strip("@!")
        asks = (each for each in before if opcode(each) == "FCHK" or "0x1ffffff," in each)
        return is_predicated(last) and any(f" {predicate}," in each for each in asks)

    @cached_property
    def apart(self) -> set[int]:
        """Blocks in which a warp's threads are where they have parted before an exchange of values: such code
        stands at the end, and never runs where warps are together (`wrong_convergence`)."""
        found: set[int] = set()
        while True:
            more = {
                block
                for block, before in enumerate(self.predecessors)
                if before and all(each in found or self._parts_to(each, block) for each in before)
            }
            if more <= found:
                return found
            found |= more

    def _parts_to(self, block: int, other: int) -> bool:
        last = self.code[self.end(block) - 1]
        return opcode(last) == "BRA.DIV" and _target(last) == self.begins[other]

    def innermost(self, *kinds: str, without: str = "never") -> list[str]:
        """The longest of the loops that have each kind of instruction, and inside no such loop."""
        best: list[str] = []
        taken: list[set[int]] = []
        for blocks in self.loops:
            body = self.instructions(blocks - self.apart)
            if any(starts(body, without)) or not all(any(starts(body, kind)) for kind in kinds):
                continue
            if not any(each < blocks for each in taken):
                taken.append(blocks)
                best = max(best, body, key=len)
        return best


def starts(code: Sequence[str], kind: str) -> list[str]:
    return [each for each in code if opcode(each).startswith(kind)]


def merges(code: Sequence[str]) -> list[list[str]]:
    """Choices by merged lists, the shortest first: from the branch past such a code to its vote.

    Code of threads that have parted (`Code.apart`) meets again at a WARPSYNC, and is left out.
    """
    found = []
    past = 0
    for index, each in enumerate(code):
        target = _target(each)
        if target is not None and opcode(each) != "BRA.DIV" and target > index + 16:
            past = index + 1
        if opcode(each) == "VOTE.ANY":
            merge = list(code[past : index + 1])
            if len(starts(merge, "SHFL")) >= 10 and not starts(merge, "WARPSYNC"):
                found.append(merge)
    return sorted(found, key=len)


def executed(code: Sequence[str]) -> int:
    return sum(opcode(each) != "NOP" for each in code)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of one of Hopper's kernels. A step is of 64 of the reduction."""

    step_cycles: int  # in which a scheduler issues what its multiplying warps do beside products
    l2_bytes: int  # loaded by one block's accelerator a step: all of it passes the L2 cache
    l2_bytes_sharing_a: int  # the same where two blocks share A; of .pairs, which share B, as before


def is_of_one_product(name: str) -> bool:
    """Whether a kernel has a `Cost`: of Hopper's, and not of a whole pass."""
    return declared()[name].hopper and not name.startswith("flashdmoe.")


def is_in_turns(name: str) -> bool:
    """Whether two warpgroups take turns: both do not multiply one tile."""
    return name.endswith(".turns")


def gathers_b(name: str) -> bool:
    """Whether the kernel always gathers the rows of B, so that its accelerator loads A only."""
    return name.endswith(".gathered")


def products_a_group(name: str) -> int:
    return 8 if is_in_turns(name) else 4


def tensor_cycles(name: str) -> int:
    """Cycles of the products of a step."""
    return TENSOR_CYCLES_IN_TURNS if is_in_turns(name) else TENSOR_CYCLES


def cost(name: str, code: Sequence[str]) -> Cost:
    warps = 1 if is_in_turns(name) else WARPS_A_SCHEDULER
    return Cost(
        step_cycles=round(warps * _a_step(Code(code).innermost("HGMMA"), "HGMMA", products_a_group(name))),
        l2_bytes=_l2_bytes(name, code, shares_a=False),
        l2_bytes_sharing_a=_l2_bytes(name, code, shares_a=True),
    )


def between_tiles(code: Sequence[str]) -> list[str]:
    """Instructions of the multiplying warps from the last product of a tile to the first of their next tile.

    Those of all branches are among them, so a warp issues fewer. Left out are the loops along the reduction.
    """
    flow = Code(code)
    tiles, steps = _loops_of_tiles(flow)
    return flow.instructions(tiles - steps)


def issued_for_boxes(code: Sequence[str]) -> tuple[int, int]:
    """Returns the (fewest, most) instructions that a warp issues from a tile to its next by storing boxes.

    These are ways through the loop over tiles that have the most stores of the tensor memory accelerator.
    Loops that wait count once. The loops along the reduction are left out.
    """
    flow = Code(code)
    tiles, steps = _loops_of_tiles(flow)

    @cache
    def ways(block: int) -> tuple[int, int, int]:
        """Returns (stores, fewest instructions, most instructions) from a block to the end of the loop."""
        own = [] if block in steps else flow.instructions({block})
        following = [
            ways(each) for each in flow.successors[block] if each in tiles and not flow.is_back(block, each)
        ]
        stores = max((found[0] for found in following), default=0)
        best = [found for found in following if found[0] == stores] or [(0, 0, 0)]
        return (
            stores + len(starts(own, "UTMASTG")),
            min(found[1] for found in best) + executed(own),
            max(found[2] for found in best) + executed(own),
        )

    head = next(each for each in tiles if all(flow.is_back(other, each) for other in tiles))
    _, fewest, most = ways(head)
    return fewest, most


def _loops_of_tiles(flow: Code) -> tuple[set[int], set[int]]:
    """Returns (blocks of the loop over tiles, those of its loops along the reduction)."""
    waits = "WARPGROUP.DEPBAR.LE gsb0, 0x0"
    tiles = next(loop for loop in flow.loops if any(waits in each for each in flow.instructions(loop)))
    steps = (loop for loop in flow.loops if loop < tiles and starts(flow.instructions(loop), "HGMMA"))
    return tiles - flow.apart, set().union(*steps)


def _a_step(loop: Sequence[str], kind: str, a_step: int) -> float:
    return executed(loop) * a_step / len(starts(loop, kind))


def _l2_bytes(name: str, code: Sequence[str], *, shares_a: bool) -> int:
    form = next(part for part in name.split(".") if part in ("forward", "input", "weight"))
    flow = Code(code)
    if gathers_b(name):
        loop = flow.innermost("UTMALDG", "SYNCS.PHASECHK", "LDGSTS")
    else:
        loop = flow.innermost("UTMALDG", "SYNCS.PHASECHK", without="LDGSTS")
    steps = sum(opcode(each) == "SYNCS.ARRIVE.TRANS64" for each in loop)  # each says how many bytes will come
    kinds = [opcode(each) for each in starts(loop, "UTMALDG")]
    halves = 0 if name.endswith(".pairs") else sum(kind.endswith("MULTICAST") for kind in kinds)  # of A
    own = [kind for kind in kinds if name.endswith(".pairs") or not kind.endswith("MULTICAST")]
    # In turns, a tile's columns are 64 of each half of SwiGLU, and a box of B has as many lines.
    boxes = BOX_BYTES | ({("forward", "3D"): 64 * 128} if name.endswith("hidden.swiglu.turns") else {})
    total = sum(boxes[form, kind.split(".")[1]] for kind in own)
    if halves and shares_a:
        total += halves * A_BYTES // 2 - steps * A_BYTES
    return round(total / steps)


# ---- rules: each gives what is wrong, nothing where all is right


def wrong_registers(code: Sequence[str], kernel: Declared, at_entry: int) -> list[str]:
    """setmaxnreg takes from the block's own registers: an increase beyond what it has, waits forever."""
    changes = [each for each in code if opcode(each).startswith("USETMAXREG")]
    less = [int(each.split()[-1], 16) for each in changes if "DEALLOC" in each]
    more = [int(each.split()[-1], 16) for each in changes if "TRY_ALLOC" in each]
    if len(less) != 1 or len(more) != 1:
        return [f"{changes} must be one decrease and one increase"]
    found = 128 * less[0] + (kernel.threads - 128) * more[0]
    have = kernel.threads * at_entry
    return [] if found <= have else [f"{less[0]} and {more[0]} a thread are {found}, of {have} registers"]


def wrong_products(code: Sequence[str], kinds: int = 1, of_a_group: int = 4) -> list[str]:
    """Four products a group, at most one group under way beside the next, and all waited for in the end.

    kinds: of products that the kernel has.
    of_a_group: how many products a group has; 8 where warpgroups take turns.
    """
    found = []
    fences = products = 0
    groups = whole = 0
    for index, each in enumerate(code):
        kind = opcode(each)
        if kind == "WARPGROUP.ARRIVE":
            fences, products = fences + 1, 0
        elif kind.startswith("HGMMA"):
            products += 1
            if each.endswith("gsb0"):
                groups += 1
                if (fences, products) != (1, of_a_group):
                    found.append(f"{index}: a group of {products} products behind {fences} fences")
                fences = products = 0
        elif kind.startswith("WARPGROUP.DEPBAR"):
            left = int(each.split()[-1], 16)
            whole += left == 0
            if left > 1:
                found.append(f"{index}: a wait that leaves {left} groups under way")
            if products:
                found.append(f"{index}: a wait inside a group: the compiler has put products in a row")
    if groups < kinds or whole != kinds:
        found.append(f"{groups} groups, and {whole} waits for all of them")
    return found


def wrong_convergence(code: Sequence[str]) -> list[str]:
    """A warp's threads are together where all must do one thing: outside of every stretch that they may
    leave at different times (BSSY to BSYNC), or behind a meeting (WARPSYNC) in the same block."""
    flow = Code(code)
    opened: list[frozenset[str] | None] = [None] * len(flow.begins)
    opened[0] = frozenset()
    rest, found = [0], {}
    while rest:
        block = rest.pop()
        now, met = set(opened[block] or ()), False
        for index in range(flow.begins[block], flow.end(block)):
            kind = opcode(code[index]).split(".")[0]
            if kind in ("BSSY", "BSYNC"):
                change = now.add if kind == "BSSY" else now.discard
                change(re.findall(r"B\d+", code[index])[0])
            met = met or kind == "WARPSYNC"
            if kind in ("HGMMA", "USETMAXREG", "UCGABAR_ARV", "WARPGROUP") and now and not met:
                found[index] = f"{index}: {code[index]} in {sorted(now)}"
        for each in flow.successors[block]:
            joined = (opened[each] or frozenset()) | now
            if joined != opened[each]:
                opened[each] = joined
                rest.append(each)
    return list(found.values())


def stores_without_fence(code: Sequence[str]) -> list[str]:
    """Stores of boxes (UTMASTG) without a fence of the asynchronous proxy since the last write (STSM)."""
    found = []
    is_fenced = False
    for index, each in enumerate(code):
        kind = opcode(each)
        if kind.startswith("STSM"):
            is_fenced = False
        elif kind.startswith("FENCE.VIEW.ASYNC"):
            is_fenced = True
        elif kind.startswith("UTMASTG") and not is_fenced:
            found.append(f"{index}: {each}")
    return found


def wrong_loads(code: Sequence[str]) -> list[str]:
    """A load past the caches' coherence may give what was there before the wait."""
    return [each for each in code if re.search(r"^LD.*\.(CONSTANT|NC)", opcode(each))]


def wrong_calls(code: Sequence[str]) -> list[str]:
    """Functions that are called in a loop: of these kernels, divisions of 64 bits.

    A division of floats calls one, too, but for numbers of extreme size alone.
    """
    flow = Code(code)
    looped: set[int] = set().union(*flow.loops)
    usual = (each for each in sorted(looped) if not all(map(flow.is_rare, flow.predecessors[each])))
    return [call for block in usual for call in starts(flow.instructions({block}), "CALL")]
