"""Opens everything the learner needs, in the order in which mistakes are cheapest to report."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.config.schema import Config
from slipstream.contract import Contract, contract_of
from slipstream.learner.checkpoint.identity import identity_of, refuse_changed_since
from slipstream.learner.checkpoint.start import look_for_start
from slipstream.learner.checkpoint.uploading import Uploader
from slipstream.learner.publishing import Publishing
from slipstream.learner.ranks.common_root import see_common_root
from slipstream.learner.ranks.ranks import leave, open_ranks
from slipstream.learner.step.reference_source import reference_digest
from slipstream.learner.step.trainer import Trainer
from slipstream.ledger.client import Ledger
from slipstream.ledger.records import RunTerms
from slipstream.lifecycle.life import Life
from slipstream.lifecycle.site import Site, open_site
from slipstream.models.architecture import positions, read_architecture, vocabulary
from slipstream.models.joined import refuse_other_names
from slipstream.models.resolve import resolve
from slipstream.prompts.known_rows import prompts_of_run
from slipstream.prompts.sets import PromptSet
from slipstream.run.folder import RunFolder
from slipstream.run.provenance import release
from slipstream.run.tokens import Tokenizer, load_tokenizer
from slipstream.telemetry.aside import AsideLog
from slipstream.telemetry.metrics import LearnerMetrics
from slipstream.telemetry.sample_log import SampleLog
from slipstream.telemetry.sinks.feeds import Sinks
from slipstream.telemetry.sinks.opening import open_sinks
from slipstream.transport.base import Sender
from slipstream.weights.manifest import Manifest

log = logging.getLogger("slipstream.learner")


@dataclass(frozen=True)
class Parts:
    """What the learner works with; all of it is closed with the exit stack. `learner` is its incarnation, and
    `identity` what the run may not change while it goes on."""

    config: Config
    folder: RunFolder
    learner: str
    site: Site
    ledger: Ledger
    trainer: Trainer
    publishing: Publishing
    sender: Sender
    prompts: PromptSet
    evaluations: Mapping[str, PromptSet]
    metrics: LearnerMetrics
    tokenizer: Tokenizer
    sinks: Sinks
    identity: dict[str, Any]
    uploader: Uploader | None
    model: Path
    poison: AsideLog

    @property
    def contract(self) -> Contract:
        """What a group of this run is."""
        return contract_of(self.config, run_terms(self))


async def open_parts(config: Config, folder: RunFolder, name: str, life: Life, stack: AsyncExitStack) -> Parts:
    """Load prompts and model, and connect; the run itself is opened by `restore.reopen`.

    Raises:
        UserError: Something named in the config cannot be had.
    """
    metrics = LearnerMetrics()
    site = await open_site(config, name, "learner", metrics, life, stack)
    model = await asyncio.to_thread(resolve, config.model.source)
    tokenizer = await asyncio.to_thread(load_tokenizer, str(model))
    prompts, evaluations = await asyncio.to_thread(prompts_of_run, config, tokenizer, model)
    _tell_refused({"data": prompts, **evaluations})
    reference = await asyncio.to_thread(reference_digest, config, model)
    identity = identity_of(config, prompts.fingerprint, model, reference, len(prompts))
    await asyncio.to_thread(refuse_changed_since, folder.checkpoints, identity, config.run.accept)
    if config.learner.start_from is not None and not any(folder.checkpoints.glob("step-*")):
        look_for_start(config.learner.start_from)
    ranks = await asyncio.to_thread(open_ranks, config.learner)
    stack.callback(leave, ranks)
    await asyncio.to_thread(see_common_root, ranks, folder.path)
    trainer = await asyncio.to_thread(Trainer, config, model, ranks)
    if config.rollout.engine.by_file_names:
        refuse_other_names(config.rollout.engine.kind, model, trainer.policy.base_tensors())
    publishing = Publishing(config, trainer, site.ledger, site.incarnation, _sizes(metrics))
    stack.callback(publishing.close)
    metrics.gpus.set(trainer.ranks.size if trainer.policy.device.type == "cuda" else 0)
    life.watch("publish", publishing.run())
    sender = await site.sender(to="buffer")
    uploader = _uploader(config, folder, metrics)
    if uploader is not None:
        life.watch("uploads", uploader.run())
    return Parts(
        config,
        folder,
        site.incarnation,
        site,
        site.ledger,
        trainer,
        publishing,
        sender,
        prompts,
        evaluations,
        metrics,
        tokenizer,
        open_sinks(config, folder, stack),
        identity,
        uploader,
        model,
        AsideLog(SampleLog(folder.poison("learner"), config.telemetry.samples_mb)),
    )


def _tell_refused(sets: Mapping[str, PromptSet]) -> None:
    """Say which rows are left out or not read as they stand; every process does the same, and this one says so."""
    for name, each in sets.items():
        if each.report.refused or each.report.literal or each.report.dropped:
            log.warning("%s: %s", name, each.report)


def _uploader(config: Config, folder: RunFolder, metrics: LearnerMetrics) -> Uploader | None:
    url = config.learner.checkpoint.upload
    return None if url is None else Uploader(url, folder.name, folder.checkpoints, metrics)


def _sizes(metrics: LearnerMetrics) -> Callable[[Manifest], None]:
    """Shows how large each published version is, and what a replica must fetch of it."""

    def show(manifest: Manifest) -> None:
        total = manifest.layout.total_bytes
        metrics.version_bytes.set(total)
        metrics.delta.set(manifest.delta.nbytes / total if manifest.delta else 1.0)

    return show


def run_terms(parts: Parts) -> RunTerms:
    """The terms on which the run is opened in the ledger."""
    config, prompts = parts.config, parts.prompts
    epochs, described = config.run.epochs, read_architecture(parts.model)
    return RunTerms(
        run_id=config.run.name or "",
        dataset_fingerprint=prompts.fingerprint,
        prompts=len(prompts),
        seed=config.run.seed,
        policy=config.staleness.policy,
        max_staleness=config.staleness.max_staleness,
        groups_per_step=config.batch.groups,
        oversampling=config.staleness.oversampling,
        max_attempts=config.rollout.attempts,
        end_ticket=None if epochs is None else epochs * len(prompts),
        ticket_deadline_s=config.rollout.ticket_seconds,
        reuse=config.buffer.reuse,
        max_groups=config.buffer.max_groups or 0,
        max_bytes=(config.buffer.max_mb or 0) << 20,
        vocabulary=vocabulary(described) or 0,
        positions=positions(described) or 0,
        release=release(),
        source_rows=prompts.source_rows,
    )
