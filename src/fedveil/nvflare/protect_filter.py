"""`ProtectFilter`: a filter for NVFlare that lets nothing out of a site but protected updates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.dxo_filter import DXOFilter
from nvflare.apis.filter import ContentBlockedException
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.utils.fl_context_utils import add_job_audit_event
from torch import Tensor

from fedveil.clients.engine import Tensors
from fedveil.defenses.base import MessageKind
from fedveil.defenses.chain import Chain
from fedveil.defenses.guarantee import exposure_of
from fedveil.errors import FedveilError, one_line
from fedveil.files import private_folder, write_atomically
from fedveil.intake import LONGEST, Intake
from fedveil.ledger.ledger import Ledger, Release
from fedveil.nvflare.arrays import RUNNING, Parts, like, to_tensors, told_apart
from fedveil.nvflare.captures import check_captures, write_capture
from fedveil.nvflare.metadata import failure, fresh, meta, metrics
from fedveil.nvflare.receive_filter import RECEIVED
from fedveil.streams import Streams
from fedveil.tree import Tree


class _Made(NamedTuple):
    """A protected result, and what an audit of it needs."""

    dxo: DXO
    kind: MessageKind  # what the defense acted on
    before: Tensors | None  # the weights that the server sent
    shown: Tensors  # the weights, or their change, as they leave


class ProtectFilter(DXOFilter):  # type: ignore[misc]  # NVFlare has no types
    """Protects the weights or the change of weights that a site sends; blocks what it cannot protect.

    ```python
    recipe.add_client_output_filter(ProtectFilter("gradient-dropout:at=upload,keep=0.8"), tasks=["train"])
    ```

    or, required by the site whatever job it is sent, in `local/privacy.json`: see docs/nvflare.md.

    - `defense`: as on the command line. It acts on an update: one that needs the data or acts on each gradient is
      refused.
    - `of`: "weights" or "delta", what it acts on. Unless it is given: weights for a method of the upload (SPM) where
      weights are sent, else their change. To act on the other than what is sent takes a `ReceiveFilter`.
    - `buffers`: "withhold" sends the server's own back, "share" sends them as they are, undefended.
    - `buffer_names`: patterns of their names.
    - `metrics`: names of single numbers that may go along, rounded to `digits` significant digits. By default none.
    - `longest`: norm of a protected update, above which it is blocked.
    - `captures`: keep what left, for an audit of the site's own: a dict of a `folder`, the script's `lr` and
      `batch_sizes` (one for each local step) and, if need be, `momentum` and `facts`, as `fedveil.capture` takes them.
    - `ledger`: a folder, in which what was spent is kept for each job; without it, it lasts as long as the process.

    Noise is drawn from the operating system's entropy.
    """

    def __init__(
        self,
        defense: str,
        of: Literal["weights", "delta"] | None = None,
        buffers: Literal["withhold", "share"] = "withhold",
        buffer_names: Sequence[str] = RUNNING,
        metrics: Sequence[str] = (),
        digits: int = 3,
        longest: float = LONGEST,
        ledger: str | None = None,
        captures: Mapping[str, Any] | None = None,
    ) -> None:
        kinds = [DataKind.WEIGHTS, DataKind.WEIGHT_DIFF]
        super().__init__(supported_data_kinds=kinds, data_kinds_to_filter=kinds)
        # NVFlare writes these attributes into a job's configuration: they have the names of the arguments.
        self.defense, self.of, self.buffers, self.ledger = defense, of, buffers, ledger
        self.buffer_names, self.metrics = tuple(buffer_names), tuple(metrics)
        self.digits, self.longest = digits, longest
        self.captures = captures if captures is None else check_captures(captures)
        if of not in (None, "weights", "delta") or buffers not in ("withhold", "share") or not 1 <= digits <= 17:
            raise FedveilError("of is 'weights' or 'delta', buffers 'withhold' or 'share', digits 1 to 17")
        self._chain = Chain.of(defense)
        for kind in ("weights", "delta") if of is None else (of,):
            _check(self._chain, kind, strict=of is not None)
        self._states = self._chain.new_states()
        self._form: dict[str, Any] | None = None
        self._ledger: Ledger | None = None

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """The result as it may leave the site, rebuilt from what was read. What cannot be protected is blocked."""
        try:
            code = shareable.get_return_code()
            if code != ReturnCode.OK:
                return failure(code)
            return self._protected(shareable, fl_ctx)
        except FedveilError as error:
            raise ContentBlockedException(f"fedveil: the result is not sent: {error}") from None
        except Exception as error:
            # The text of somebody else's error may quote the data, so only its type is told.
            raise ContentBlockedException(
                f"fedveil: the result could not be protected ({type(error).__name__})"
            ) from None

    def process_dxo(self, dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> DXO:
        """A result of weights or of their change, protected."""
        return self._made(dxo, fl_ctx).dxo

    # ---- a result --------------------------------------------------------------------------------------

    def _made(self, dxo: DXO, fl_ctx: FLContext) -> _Made:
        sent: MessageKind = "weights" if dxo.data_kind == DataKind.WEIGHTS else "delta"
        after = told_apart(to_tensors(dxo.data), self.buffer_names)
        received = fl_ctx.get_prop(RECEIVED)
        before = None if received is None else told_apart(received, self.buffer_names)
        self._check_form(after, before)
        kind = self._kind(sent)
        weights = self._defended(kind, _turned(after.weights, sent, kind, before))
        out = {**_turned(weights, kind, sent, before), **self._buffers(sent, after.buffers, before)}
        out = {name: out[name] for name in self._form or {}}  # the order of the script's own would tell something
        made = DXO(dxo.data_kind, like(out, dxo.data), meta(dxo, self.metrics, self.digits))
        return _Made(made, kind, None if before is None else before.weights, weights)

    def _protected(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        try:
            dxo = from_shareable(shareable)
        except Exception:  # what NVFlare raises here is not declared
            raise FedveilError("it is not a DXO, so nothing is known of what is in it") from None
        if dxo.data_kind == DataKind.METRICS:
            told = metrics(dxo.data, self.metrics, self.digits)
            if not told:
                raise FedveilError("none of its metrics is among those that may leave: name them in metrics=")
            return fresh(shareable, DXO(DataKind.METRICS, told))
        if dxo.data_kind not in self.data_kinds:
            kind = f"the kind {DataKind(dxo.data_kind).value}" if dxo.data_kind in set(DataKind) else "an unknown kind"
            raise FedveilError(f"it is of {kind}, which no defense protects")
        made = self._made(dxo, fl_ctx)
        # Spend first: nothing may go out uncounted.
        self._spend(made.shown, fl_ctx)
        self._capture(made, shareable, fl_ctx)
        made.dxo.add_filter_history(type(self).__name__)
        add_job_audit_event(fl_ctx=fl_ctx, msg=f"protected by {self._chain}")
        return fresh(shareable, made.dxo)

    def _capture(self, made: _Made, shareable: Shareable, fl_ctx: FLContext) -> None:
        """Keep what leaves, where it is asked for. It leaves all the same where it cannot be kept: it is protected."""
        if self.captures is None:
            return
        try:
            if made.before is None:
                raise FedveilError("what the server sent is not known: add fedveil.nvflare.ReceiveFilter")
            write_capture(self.captures, made.kind, made.before, made.shown, self._chain, shareable, fl_ctx)
        except (FedveilError, TypeError, ValueError) as error:
            self.log_warning(fl_ctx, f"fedveil: what left was not captured: {one_line(error)}")

    def _kind(self, sent: MessageKind) -> MessageKind:
        if self.of is not None:
            return self.of
        native = all(type(defense).place == "upload" for defense in self._chain.defenses)
        return sent if native else "delta"

    def _defended(self, kind: MessageKind, update: Tensors) -> Tensors:
        self._chain.check_parameters(update)
        shown = self._chain.protect_message(Tree.expand(update, 1), kind, Streams.secure([0]), self._states).row(0)
        wrong = Intake(update, longest=self.longest).refuse(shown)
        if wrong:
            raise FedveilError(f"the protected update {wrong}")
        for position, defense in enumerate(self._chain.defenses):
            if defense.state_scope == "round":
                self._states[position].clear()
        return shown

    def _check_form(self, after: Parts, before: Parts | None) -> None:
        """Refuse arrays of other names, shapes or types than the server's, or than those of the first result."""
        tensors = {**after.weights, **after.buffers}
        if self._form is None:
            self._form = tensors if before is None else {**before.weights, **before.buffers}
            self._form = {name: tensor.to("meta") for name, tensor in self._form.items()}
        wrong = Intake(self._form).refuse(tensors)
        if wrong:
            raise FedveilError(f"the update {wrong}")
        if before is not None:
            wrong = Intake(self._form).refuse({**before.weights, **before.buffers})
            if wrong:
                raise FedveilError(f"the model that the server sent {wrong}")

    def _buffers(self, sent: MessageKind, after: Tensors, before: Parts | None) -> Tensors:
        """The server's own (no change of them), or what the site has, where that is allowed."""
        if self.buffers == "share":
            return after
        if sent == "delta":
            return {name: tensor.new_zeros(tensor.shape) for name, tensor in after.items()}
        if after and before is None:
            raise FedveilError(
                f"its buffer {next(iter(after))!r:.80} may not leave, and the server's own is not known: add "
                "fedveil.nvflare.ReceiveFilter to the task data filters"
            )
        return before.buffers if before else {}

    # ---- what was spent ------------------------------------------------------------------------------

    def _spend(self, weights: Tensors, fl_ctx: FLContext) -> None:
        path = self._ledger_path(fl_ctx)
        if self._ledger is None:
            self._ledger = Ledger(exposure_of(weights, seeded=False, bare_buffers=self.buffers == "share"))
            if path is not None and path.exists():
                self._ledger.load_state_dict(_read(path), known=[self._chain])
        self._ledger.spend(0, Release(self._chain))
        if path is not None:
            write_atomically(path, json.dumps(self._ledger.state_dict()).encode())
        self.log_info(fl_ctx, f"fedveil: protected by {self._chain}. {self._ledger.statement().sentence}")

    def _ledger_path(self, fl_ctx: FLContext) -> Path | None:
        if self.ledger is None:
            return None
        names = (str(fl_ctx.get_identity_name()), str(fl_ctx.get_job_id()))
        safe = ["".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in name) for name in names]
        return private_folder(Path(self.ledger)) / f"{'.'.join(safe)}.json"


def _check(chain: Chain, kind: MessageKind, *, strict: bool) -> None:
    """Refuse a chain that can protect no result, when the filter is made and not at the end of a training."""
    if chain.aggregates:
        raise FedveilError(f"{chain} acts on the server: there is nothing for a site to protect with it")
    tiny = Tree({"w": Tensor([[0.5, 0.25]])})
    try:
        chain.protect_message(tiny, kind, Streams.secure([0]), chain.new_states())
    except FedveilError:
        if strict or kind == "delta":  # every chain that can protect weights can protect their change
            raise


def _turned(tensors: Tensors, held: MessageKind, wanted: MessageKind, before: Parts | None) -> Tensors:
    """Weights as their change, or the change as weights."""
    if held == wanted:
        return tensors
    if before is None:
        raise FedveilError(
            f"the defense acts on {'the change of weights' if wanted == 'delta' else 'weights'}, and the weights that "
            "the server sent are not known: add fedveil.nvflare.ReceiveFilter to the task data filters"
        )
    sign = -1 if wanted == "delta" else 1
    return {name: tensor + sign * before.weights[name] for name, tensor in tensors.items()}


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise FedveilError(f"the ledger {path.name} cannot be read: what was spent before is not known") from None
