"""The task that trains on several ranks. Only child processes import this module, for it loads torch.

The arm's process launches the ranks and sends its requests to the first of them over a socket, which tells the others and answers
for all.
"""

import secrets
import statistics
import tempfile
import threading
import time
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from workbench.data.datasets import open_dataset
from workbench.data.loading import make_loader, validation_batches
from workbench.data.sources import check_source
from workbench.experiment.tasks import Block, GuardRun, OnStep
from workbench.hardware.facts import DeviceFacts
from workbench.models.build import build_model
from workbench.parallel.collectives import CollectiveSpy
from workbench.parallel.dryrun import autocast_dtype
from workbench.parallel.fake import kinds_of_buffers
from workbench.parallel.launch import launch
from workbench.parallel.ledger import Ledger
from workbench.parallel.mesh import build_mesh
from workbench.parallel.parallelize import parallelize
from workbench.parallel.plan import ParallelPlan
from workbench.parallel.step_memory import TrainingStep, follow
from workbench.trainer.config import TrainConfig
from workbench.trainer.optim import learning_rate

START_S = 200.0


class ShardingTask:
    """Training steps of ``config`` under its parallel plan.

    A block's ``peak_memory_bytes`` is the largest of all ranks: the allocator's on GPUs, the ledger's count of live tensors on a
    CPU. ``extra`` holds what collectives moved in one step, by kind and group size, and the breakdown at the peak.
    """

    def __init__(self, config: TrainConfig, facts: DeviceFacts) -> None:
        self.config, plan = config, ParallelPlan(**config.parallel)
        world = plan.world
        self._folder = tempfile.TemporaryDirectory()
        address, key = str(Path(self._folder.name) / "ranks"), secrets.token_bytes(16)
        self._failure: BaseException | None = None
        listener = Listener(address, "AF_UNIX", authkey=key)
        self._ranks = threading.Thread(target=self._launch, args=(world, address, key, listener), daemon=True)
        self._ranks.start()
        try:
            self._connection = listener.accept()
        except OSError:
            raise self._failure or RuntimeError("the ranks did not start") from None
        self._memory = self._ask("memory")

    def warm_up(self, steps: int) -> None:
        self._ask("steps", steps=steps)

    def block(self, steps: int) -> Block:
        answer = self._ask("steps", steps=steps)
        return Block(
            step_time=answer["step_time"],
            samples_per_step=self.config.global_batch,
            anatomy=answer["anatomy"],
            peak_memory_bytes=answer["peak"] or self._memory["peak"],
            extra=self._memory["extra"],
        )

    def guard_run(self, seed: int, steps: int, on_step: OnStep) -> GuardRun:
        self._connection.send({"ask": "guard", "seed": seed, "steps": steps})
        losses: list[float] = []
        while "loss" not in (answer := self._receive()):
            losses.append(answer["step_loss"])
            on_step(len(losses) - 1, loss=losses[-1])
        return GuardRun(answer["loss"], answer["accuracy"], {"loss": losses})

    def _launch(self, world: int, address: str, key: bytes, listener: Listener) -> None:
        try:
            launch(serve, world, address, key, self.config.model_dump(mode="json"))
        except BaseException as error:  # its traceback names the rank; whoever waits for the ranks raises it
            self._failure = error
        finally:
            listener.close()

    def _ask(self, ask: str, **fields: Any) -> dict[str, Any]:
        self._connection.send({"ask": ask, **fields})
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = self._connection.recv()
        except EOFError:
            self._ranks.join(START_S)
            raise self._failure or RuntimeError("the ranks went away") from None
        return answer


def serve(address: str, key: bytes, fields: dict[str, Any]) -> None:
    """On every rank: do what the arm's process asks until it goes away."""
    rank = _Rank(TrainConfig(**fields))
    connection = Client(address, "AF_UNIX", authkey=key) if dist.get_rank() == 0 else None
    while (request := _next(connection)) is not None:
        rank.connection = connection
        answer = getattr(rank, request.pop("ask"))(**request)
        if connection is not None:
            connection.send(answer)


def _next(connection: "Connection[Any, Any] | None") -> dict[str, Any] | None:
    held: list[dict[str, Any] | None] = [None]
    if connection is not None:
        try:
            held = [connection.recv()]
        except EOFError:
            held = [None]
    dist.broadcast_object_list(held, src=0)
    return held[0]


class _Rank:
    """One rank's model, optimizer and data."""

    def __init__(self, config: TrainConfig) -> None:
        self.config, self.plan = config, ParallelPlan(**config.parallel)
        self.connection: Any = None
        self.device = (
            torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        )
        self.mesh = build_mesh(self.plan, self.device.type)

    def build(self, seed: int) -> None:
        config, info = self.config, check_source(self.config.data)
        torch.manual_seed(seed)
        channels, height, _ = info.image_shape
        plain = build_model(
            config.model, num_classes=info.num_classes, image_size=height, in_channels=channels, **config.model_args
        )
        self.step = TrainingStep(
            parallelize(plain.to(self.device), self.plan, self.mesh), autocast=autocast_dtype(self.plan)
        )
        self.loader = make_loader(open_dataset(config.data, "train"), config.global_batch, seed=seed)
        self.taken = 0

    def steps(self, steps: int) -> dict[str, Any]:
        """Seconds per step, all of it between two barriers, and the allocator's peak on a GPU."""
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        parts: dict[str, list[float]] = {"forward": [], "backward": [], "optimizer": []}
        dist.barrier()
        began = time.perf_counter()
        for _ in range(steps):
            self.take(parts)
        if cuda:
            torch.cuda.synchronize()
        dist.barrier()
        step_time = (time.perf_counter() - began) / max(steps, 1)
        anatomy = {} if cuda else {name: statistics.fmean(times) for name, times in parts.items() if times}
        anatomy["other"] = max(step_time - sum(anatomy.values()), 0.0)
        peak = self._largest(torch.cuda.max_memory_allocated() if cuda else 0)
        return {"step_time": step_time, "anatomy": anatomy, "peak": peak}

    def memory(self) -> dict[str, Any]:
        """Live bytes at the peak of a step on the rank that needs the most, and what collectives moved in one step."""
        with Ledger(self.device.type) as ledger, kinds_of_buffers(ledger):
            self.build(self.config.seed)
            images, labels = self._share(*next(self.loader))
            peak = follow(self.step, ledger, (images, labels), on_host=self.plan.cpu_offload)
        with CollectiveSpy(self.mesh) as spy:
            self.take({})
        trained = sum(p.numel() for p in self.step.parameters)
        # What crosses of the weights; the sums of a norm and of a loss are single numbers.
        moved = [c for c in spy.calls if c.elements > 1]
        passes = sum(c.elements * (2 if c.operation == "all-reduce" else 1) for c in moved)
        extra = {"sent_bytes": sum(c.ring_bytes for c in moved), "passes": passes / trained}
        for call in moved:
            name = f"{call.operation} along {call.axis}, bytes"
            extra[name] = extra.get(name, 0.0) + call.bytes
        extra |= {
            f"peak {kind}": float(size)
            for kind, size in peak.breakdown.items()
            if kind not in ("workspace", "rounding")
        }
        asked = peak.allocated - peak.breakdown["rounding"] - peak.breakdown["workspace"]
        return {"peak": self._largest(asked), "extra": extra}

    def guard(self, seed: int, steps: int) -> dict[str, Any]:
        """Train anew from ``seed``; every step's loss is sent on as a sign of life."""
        self.build(seed)
        for _ in range(steps):
            loss = float(self._mean(self.take({})))
            if self.connection is not None:
                self.connection.send({"step_loss": loss})
        return self._evaluate()

    def take(self, parts: dict[str, list[float]]) -> Tensor:
        """One step on this rank's share of the next batch; the loss of the share."""
        for group in self.step.optimizer.param_groups:
            group["lr"] = learning_rate(self.config.model_copy(update={"schedule": "constant"}), self.taken)
        self.taken += 1
        images, labels = self._share(*next(self.loader))
        marks = [time.perf_counter()]
        loss = self.step.forward(images, labels)
        marks.append(time.perf_counter())
        loss.backward()
        marks.append(time.perf_counter())
        self.step.update()
        marks.append(time.perf_counter())
        for times, start, end in zip(parts.values(), marks, marks[1:], strict=False):
            times.append(end - start)
        return loss.detach()

    def _share(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        ranks = self.plan.replicate * self.plan.shard
        mine = slice(dist.get_rank() % ranks, None, ranks)
        return images[mine].to(self.device), labels[mine].to(self.device)

    @torch.no_grad()
    def _evaluate(self) -> dict[str, float]:
        """Over the whole validation split, on every rank alike."""
        self.step.model.eval()
        loss, right, count = 0.0, 0, 0
        for images, labels in validation_batches(open_dataset(self.config.data, "val"), self.config.global_batch):
            images, labels = images.to(self.device), labels.to(self.device)
            logits = self.step.model(images).float()
            loss += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
            right += int((logits.argmax(1) == labels).sum())
            count += len(labels)
        self.step.model.train()
        return {"loss": loss / count, "accuracy": right / count}

    def _mean(self, value: Tensor) -> Tensor:
        dist.all_reduce(value)
        return value / dist.get_world_size()

    def _largest(self, value: int) -> int:
        held = torch.tensor(value, device=self.device)
        dist.all_reduce(held, dist.ReduceOp.MAX)
        return int(held)
