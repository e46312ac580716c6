"""Draw docs/images/architecture.svg: `python docs/draw_architecture.py`.

Boxes are filled and have white text. Lines and labels outside of boxes have a gray that is readable
on a light and on a dark page, so one file serves both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PICTURE = Path(__file__).resolve().parent / "images" / "architecture.svg"
WIDTH, HEIGHT = 900, 368
GRAY = "#76808b"
DRIVER, TRAINED, FROZEN, ROLLOUT = "#3d4f91", "#1d6f8c", "#5b6472", "#8a4b9c"
GPU_WIDTH, ROW_HEIGHT, GAP, PADDING = 58, 40, 8, 14
TOP = 168
"""Upper edge of the pools."""


@dataclass(frozen=True)
class Pool:
    """A set of GPUs, and the worker groups on it: name and color of each role."""

    name: str
    x: int
    first_gpu: int
    num_gpus: int
    roles: Mapping[str, str]

    @property
    def width(self) -> int:
        """Pixels from the left edge to the right one."""
        return self.num_gpus * (GPU_WIDTH + GAP) - GAP + 2 * PADDING

    @property
    def center(self) -> int:
        """Where the arrow from the driver ends."""
        return self.x + self.width // 2


POOLS = (
    Pool("actor_rollout_ref_pool", 24, 0, 4, {"actor": TRAINED, "reference": FROZEN}),
    Pool("critic_pool", 446, 4, 2, {"critic": TRAINED, "reward model": FROZEN}),
    Pool("rollout_pool", 724, 6, 2, {"rollout engine": ROLLOUT}),
)


def text(x: float, y: float, words: str, size: int = 13, color: str = GRAY, **style: str) -> str:
    """A line of text around a point."""
    more = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in style.items())
    anchor = "" if "text_anchor" in style else ' text-anchor="middle"'
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{color}"{anchor}{more}>{words}</text>'


def box(x: float, y: float, width: float, height: float, color: str) -> str:
    """A filled box with round corners."""
    size = f'width="{width}" height="{height}" rx="6"'
    return f'<rect x="{x}" y="{y}" {size} fill="{color}"/>'


def arrow(path: str, color: str = GRAY, both: bool = False) -> str:
    """A line that ends in an arrow head."""
    start = ' marker-start="url(#head)"' if both else ""
    line = f'fill="none" stroke="{color}" stroke-width="2"'
    return f'<path d="{path}" {line} marker-end="url(#head)"{start}/>'


def draw_pool(pool: Pool) -> Iterator[str]:
    """A frame around the GPUs, with a row for each worker group."""
    height = 2 * ROW_HEIGHT + GAP + 2 * PADDING + 18
    frame = f'width="{pool.width}" height="{height}" rx="10" fill="none" stroke="{GRAY}"'
    yield f'<rect x="{pool.x}" y="{TOP}" {frame} stroke-width="1.5" stroke-dasharray="5 4"/>'
    for column in range(pool.num_gpus):
        x = pool.x + PADDING + column * (GPU_WIDTH + GAP) + GPU_WIDTH / 2
        yield text(x, TOP + PADDING + 8, f"GPU {pool.first_gpu + column}", size=12)
    row_height = (2 * ROW_HEIGHT + GAP - GAP * (len(pool.roles) - 1)) // len(pool.roles)
    for row, (role, color) in enumerate(pool.roles.items()):
        y = TOP + PADDING + 18 + row * (row_height + GAP)
        yield box(pool.x + PADDING, y, pool.width - 2 * PADDING, row_height, color)
        for column in range(1, pool.num_gpus):
            x = pool.x + PADDING + column * (GPU_WIDTH + GAP) - GAP / 2
            yield f'<path d="M{x} {y} v6 m0 {row_height - 12} v6" stroke="#fff"/>'
        middle = y + row_height / 2 + 5
        yield text(pool.center, middle, role, size=14, color="#fff", font_weight="600")
    yield text(pool.center, TOP + height + 20, pool.name, font_family="monospace")


def draw() -> str:
    """Return the picture."""
    parts = [box(24, 16, WIDTH - 48, 62, DRIVER)]
    parts += [text(WIDTH / 2, 41, "Driver: one Python process", 16, "#fff", font_weight="600")]
    stages = "step: sample, score, estimate advantages, update, sync weights"
    parts += [text(WIDTH / 2, 63, stages, 14, "#fff")]
    for pool in POOLS:
        parts += [arrow(f"M{pool.center} 80 V{TOP - 6}", both=True), *draw_pool(pool)]
    left = {"text_anchor": "start"}
    parts += [text(POOLS[0].center + 12, 118, "calls to worker groups,", **left)]
    parts += [text(POOLS[0].center + 12, 136, "batches as DataProto", **left)]
    actor, _, rollout = POOLS
    for row, words in enumerate(
        ("row: a worker", "group, one role", "column: a", "process, one GPU")
    ):
        parts += [text(actor.x + actor.width + 12, TOP + 46 + 19 * row, words, 12, **left)]
    bottom = TOP + 146
    curve = f"M{actor.x + 26} {bottom - 8} V{bottom + 28} H{rollout.center + 60} V{bottom - 8}"
    parts += [arrow(curve)]
    parts += [text(WIDTH / 2, bottom + 46, "weight sync: the hash of every tensor is checked")]
    head = (
        '<marker id="head" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto-start-reverse"><path d="M0 0 L8 4 L0 8 z" fill="{GRAY}"/></marker>'
    )
    font = 'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"'
    lines = "\n".join(f"  {part}" for part in parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {font}>\n'
        f"  <defs>{head}</defs>\n{lines}\n</svg>\n"
    )


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
    print(f"wrote {PICTURE}")
