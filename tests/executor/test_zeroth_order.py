"""Zeroth-order steps: a plan's graphs against the same estimator on a whole model in memory, to the bit."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from ssdplan import native
from ssdplan.executor.data.text_data import Batch
from ssdplan.executor.device.emulated import EmulatedDevice
from ssdplan.executor.device.tensors import DTYPE_NAMES, DTYPES
from ssdplan.executor.memory.store_records import Records
from ssdplan.executor.model.kinds import spared_parameters
from ssdplan.executor.model.layers import MicroBatch
from ssdplan.executor.optimizer.adamw import AdamW
from ssdplan.executor.optimizer.zeroth_order import MeZO, require_distinct_keys
from ssdplan.executor.recipe import Recipe, Watch
from ssdplan.executor.runtime.session import Session
from ssdplan.executor.sessions import _session
from ssdplan.executor.store import Store
from ssdplan.plans.documents.plan import Plan
from ssdplan.plans.documents.state_layout import GRAIN
from ssdplan.plans.documents.zeroth_order import ZerothOrder
from ssdplan.plans.schedule.build import build_schedule
from tests import reference
from tests.executor.runs import LENGTH, micro_batches_of, opened, prepare
from tests.made.plans import make_plan

STEPS = 4


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("models"))


class InMemory:
    """MeZO in plain PyTorch: a whole model, its parameters moved along z and back (Malladi et al., 2023)."""

    def __init__(
        self,
        path: Path,
        optimizer: MeZO,
        directions: int,
        spared: frozenset[str] = frozenset(),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.model = reference.load(path, dtype)
        self.optimizer, self.directions, self.spared = optimizer, directions, spared
        self.parameters = dict(self.model.named_parameters())
        self.masters = {name: each.detach().clone() for name, each in reference.load(path).named_parameters()}

    def z(self, name: str, step: int, direction: int) -> torch.Tensor:
        """The kernel's own directions, which tests/native holds to their definition."""
        parameter = self.parameters[name]
        drawn = torch.zeros(parameter.numel())
        key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")
        moves = [(step, direction, -1.0, 1.0)]
        native.zeroth_order_update(
            drawn.data_ptr(), "fp32", drawn.numel(), seed=self.optimizer.seed, tensor=key, pending=moves
        )
        return drawn.view(parameter.shape)

    def loss(self, batches: Sequence[MicroBatch]) -> float:
        tokens = sum(int((batch.labels[:, 1:] != -100).sum()) for batch in batches)
        total = 0.0
        for batch in batches:
            found = self.model(
                input_ids=batch.input_ids,
                attention_mask=batch.attention_mask,
                labels=batch.labels,
                num_items_in_batch=torch.tensor(tokens),
            )
            total += float(found.loss)
        return total

    @torch.no_grad()
    def step(self, step: int, batches: Sequence[MicroBatch]) -> list[tuple[float, float]]:
        optimizer = self.optimizer
        losses = []
        for direction in range(self.directions):
            both = []
            for sign in (1.0, -1.0):
                for name, parameter in self.parameters.items():
                    difference = torch.tensor(optimizer.eps) * self.z(name, step, direction)
                    rounded = self.masters[name].to(parameter.dtype).float()
                    parameter.copy_(rounded + difference if sign > 0 else rounded - difference)
                both.append(self.loss(batches))
            losses.append((both[0], both[1]))
        for direction, (plus, minus) in enumerate(losses):
            scale = optimizer.lr / self.directions * (plus - minus) / (2 * optimizer.eps)
            for name, master in self.masters.items():
                decays = direction == 0 and name not in self.spared
                keep = 1.0 - optimizer.lr * optimizer.weight_decay if decays else 1.0
                moved = torch.tensor(scale, dtype=torch.float32) * self.z(name, step, direction)
                master.copy_(torch.tensor(keep, dtype=torch.float32) * master - moved)
        return losses

    @torch.no_grad()
    def weights(self) -> dict[str, torch.Tensor]:
        """The masters, rounded to what is computed with; the model has them then."""
        for name, parameter in self.parameters.items():
            parameter.copy_(self.masters[name])
        return self.parameters


def expected_of(oracle: InMemory, directory: Path) -> list[list[tuple[float, float]]]:
    """What `trained` finds of losses."""
    losses = [oracle.step(step, micro_batches_of(directory, step, micro_batches=2)) for step in range(STEPS)]
    oracle.weights()
    with torch.no_grad():
        evaluated = oracle.loss(micro_batches_of(directory, 0, micro_batches=2))
    return [*losses, [(evaluated, evaluated)]]


@contextlib.contextmanager
def session_of(plan: Plan, directory: Path, work: Path, recipe: Recipe) -> Iterator[Session]:
    dtype = DTYPES[plan.decision.precision]
    model, schedule = opened(directory / "llama", dtype), build_schedule(plan.model, plan.decision)
    records = Records.of(schedule, snapshots=False)
    store = None
    work.mkdir()
    if records.records:
        store = Store.create([work], records.records, plan.sha256(), durable=False)
    with _session(
        plan, model, EmulatedDevice(), schedule, records, store, recipe, Watch(), held=False, kept=None, evaluated=True
    ) as session:
        yield session
    if store:
        store.remove()


def batches_of(micro_batches: Sequence[MicroBatch]) -> list[Batch]:
    return [
        Batch(
            input_ids=m.input_ids.numpy(),
            labels=m.labels.numpy(),
            attention_mask=None if m.attention_mask is None else m.attention_mask.numpy(),
        )
        for m in micro_batches
    ]


def trained(
    directory: Path,
    work: Path,
    optimizer: MeZO,
    recipe: Recipe | None = None,
    dtype: torch.dtype = torch.float32,
    **choices: object,
) -> tuple[list[list[tuple[float, float]]], dict[str, torch.Tensor]]:
    """Losses of all steps, then of an evaluation of the first one's rows, and the weights when what is pending is
    applied."""
    plan = make_plan(
        opened(directory / "llama", dtype),
        precision=DTYPE_NAMES[dtype],
        sequence_length=LENGTH,
        micro_batches=2,
        **choices,
    )
    losses = []
    with session_of(plan, directory, work, recipe or Recipe(steps=STEPS, optimizer=AdamW(lr=1.0))) as session:
        for step in range(STEPS):
            batches = batches_of(micro_batches_of(directory, step, micro_batches=2))
            found, _, _ = session.zeroth_order_step(step, batches, optimizer)
            session.move(optimizer, optimizer.moves(step, found))
            losses.append(found)
        evaluated = session.evaluate(iter([batches_of(micro_batches_of(directory, 0, micro_batches=2))]))
        losses.append([(evaluated, evaluated)])
        assert not session.pending_here and not session.pending_away
        pieces: dict[str, list[torch.Tensor]] = {}
        for name, piece in session.states.tensors():
            pieces.setdefault(name, []).append(piece.clone())
    return losses, {name: torch.cat(parts) for name, parts in pieces.items()}


@pytest.mark.parametrize(("directions", "weight_decay"), [(1, 0.0), (3, 0.1)])
def test_steps_have_the_bits_of_the_same_estimator_in_memory(
    directory: Path, tmp_path: Path, directions: int, weight_decay: float
) -> None:
    optimizer = MeZO(lr=1e-2, eps=1e-2, weight_decay=weight_decay, seed=5)
    recipe = Recipe(steps=STEPS, optimizer=AdamW(lr=1.0, weight_decay=weight_decay, decay_all=False))
    model = opened(directory / "llama", torch.float32)
    oracle = InMemory(directory / "llama", optimizer, directions, spared_parameters(model.module))
    expected = expected_of(oracle, directory)
    for number, choices in enumerate(
        [
            {"unified": True},
            {"unified": True, "on_device": 1.0},
            {"parameters": 0.4, "on_device": 0.3},
            {"parameters": 0.4, "on_device": 0.3, "every": 3},
            {"parameters": 1.0, "every": 2},
            {"unified": True, "on_device": 0.5, "every": 64},
        ]
    ):
        zeroth = ZerothOrder(directions=directions, written_every=choices.pop("every", 1))
        losses, weights = trained(directory, tmp_path / str(number), optimizer, recipe, zeroth_order=zeroth, **choices)
        assert losses == expected, number
        for name, parameter in oracle.weights().items():
            assert torch.equal(weights[name], parameter.detach().flatten()), (number, name)
    first, last = (sum(map(sum, step)) for step in (expected[0], expected[STEPS - 1]))
    assert first != last


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_keep_what_half_precision_would_lose(directory: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    """By a rate at which no update is as large as half a weight's last digit."""
    optimizer = MeZO(lr=2e-6, eps=1e-2, seed=5)
    oracle = InMemory(directory / "llama", optimizer, 2, dtype=dtype)
    expected = expected_of(oracle, directory)
    for number, choices in enumerate(
        [
            {"unified": True},
            {"unified": True, "on_device": 0.5, "every": 3},
            {"parameters": 0.4, "on_device": 0.3, "every": 2},
            {"parameters": 0.4, "on_device": 0.3, "in_turns": True},
        ]
    ):
        ways = {name: choices.pop(name) for name in ("every", "in_turns") if name in choices}
        zeroth = ZerothOrder(
            directions=2, masters=True, written_every=ways.get("every", 1), in_turns=ways.get("in_turns", False)
        )
        losses, weights = trained(
            directory, tmp_path / str(number), optimizer, dtype=dtype, zeroth_order=zeroth, **choices
        )
        assert losses == expected, number
        for name, parameter in oracle.weights().items():
            assert weights[name].dtype == dtype
            assert torch.equal(weights[name], parameter.detach().flatten()), (number, name)
    begun = dict(reference.load(directory / "llama").named_parameters())
    moved = [float((oracle.masters[name] != each).float().mean()) for name, each in begun.items() if each.numel() > 64]
    assert min(moved) > 0.5


@pytest.mark.parametrize("in_turns", [False, True])
def test_turns_threads_runners_and_tiers_change_no_bit(directory: Path, tmp_path: Path, in_turns: bool) -> None:
    seen = []
    for number, (choices, serial) in enumerate(
        itertools.product([{"unified": True}, {"on_device": 0.5, "parameters": 0.3}], [True, False])
    ):
        zeroth = ZerothOrder(directions=2, in_turns=in_turns and number > 0)
        recipe = Recipe(steps=STEPS, optimizer=AdamW(lr=1.0), serial=serial)
        seen.append(trained(directory, tmp_path / str(number), MeZO(lr=1e-2), recipe, zeroth_order=zeroth, **choices))
    for losses, weights in seen[1:]:
        assert losses == seen[0][0]
        assert all(torch.equal(weights[name], seen[0][1][name]) for name in weights)


@pytest.mark.parametrize(
    ("dtype", "masters", "directions"),
    [(torch.float32, False, 1), (torch.bfloat16, False, 3), (torch.bfloat16, True, 1), (torch.bfloat16, True, 2)],
)
def test_pieces_change_no_bit(
    directory: Path, tmp_path: Path, dtype: torch.dtype, masters: bool, directions: int
) -> None:
    """Losses of steps and of an evaluation, and weights, wherever parameters live and however small the pieces are."""
    seen = []
    for number, (grains, choices) in enumerate(
        [
            (0, {"unified": True}),
            (1, {"unified": True, "parameters": 0.0}),
            (3, {"unified": True, "parameters": 0.0, "on_device": 0.5}),
            (1, {"parameters": 0.0, "every": 3}),
            (5, {"parameters": 0.4, "on_device": 0.3, "every": 2}),
            (1 << 20, {"parameters": 1.0}),
            (1, {"unified": True, "parameters": 0.0, "every": 2, "in_turns": True}),
            (2, {"parameters": 0.5, "every": 2, "in_turns": True}),
        ]
    ):
        every, in_turns = choices.pop("every", 1), choices.pop("in_turns", False)
        zeroth = ZerothOrder(
            directions=directions,
            masters=masters,
            written_every=every,
            in_turns=in_turns,
            piece_elements=grains * GRAIN,
        )
        seen.append(
            trained(directory, tmp_path / str(number), MeZO(lr=1e-2), dtype=dtype, zeroth_order=zeroth, **choices)
        )
    for losses, weights in seen[1:]:
        assert losses == seen[0][0]
        assert all(torch.equal(weights[name], seen[0][1][name]) for name in weights)


def test_two_tensors_never_share_a_direction(directory: Path) -> None:
    require_distinct_keys(opened(directory / "llama", torch.float32).states)


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whose table of token embeddings has rows of 64, and is not the head's."""
    return prepare(tmp_path_factory.mktemp("untied"), tied=False, hidden=64)


@pytest.mark.parametrize(
    ("dtype", "masters", "directions"),
    [(torch.float32, False, 1), (torch.float32, False, 2), (torch.bfloat16, False, 2), (torch.bfloat16, True, 1)],
)
def test_a_table_by_rows_changes_no_bit(
    untied: Path, tmp_path: Path, dtype: torch.dtype, masters: bool, directions: int
) -> None:
    """Losses of steps and of an evaluation, and all weights, wherever the other states live; its rows that no token has
    named are updated as the others are."""
    optimizer = MeZO(lr=1e-2, eps=1e-2, weight_decay=0.1, seed=5)
    recipe = Recipe(steps=STEPS, optimizer=AdamW(lr=1.0, weight_decay=0.1, decay_all=False))
    seen = []
    for number, choices in enumerate(
        [
            {"parameters": 1.0},
            {"parameters": 1.0, "by_rows": True},
            {"parameters": 1.0, "by_rows": True, "written_every": 3},
            {"parameters": 1.0, "by_rows": True, "written_every": 64, "in_turns": True},
            {"parameters": 1.0, "by_rows": True, "piece_elements": 3 * GRAIN, "in_turns": directions == 1},
            {"parameters": 0.0, "by_rows": True, "written_every": 2, "piece_elements": GRAIN},
            {"parameters": 0.5, "by_rows": True},
        ]
    ):
        zeroth = ZerothOrder(
            directions=directions,
            masters=masters,
            **{name: choices.pop(name) for name in ZerothOrder.model_fields if name in choices},
        )
        work = tmp_path / str(number)
        seen.append(trained(untied, work, optimizer, recipe, dtype=dtype, zeroth_order=zeroth, **choices))
    for losses, weights in seen[1:]:
        assert losses == seen[0][0]
        assert all(torch.equal(weights[name], seen[0][1][name]) for name in weights)
    if dtype == torch.float32:
        model = opened(untied / "llama", dtype)
        oracle = InMemory(untied / "llama", optimizer, directions, spared_parameters(model.module))
        assert expected_of(oracle, untied) == seen[1][0]
        for name, parameter in oracle.weights().items():
            assert torch.equal(seen[1][1][name], parameter.detach().flatten()), name
        ids = [m.input_ids for step in range(STEPS) for m in micro_batches_of(untied, step, micro_batches=2)]
        assert 0 < torch.cat([each.flatten() for each in ids]).unique().numel() < 300 < model.vocab_size
