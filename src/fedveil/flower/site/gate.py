"""`Gate`: what a site makes of every reply before it leaves."""

from __future__ import annotations

import hashlib
import logging
from typing import Any

from flwr.app import Message, RecordDict
from flwr.common.config import get_fused_config_from_fab

from fedveil.errors import FedveilError
from fedveil.flower.outgoing import Sender, protected_content, refusal, reported, told_of
from fedveil.flower.records import the_arrays, to_tensors, told_apart
from fedveil.flower.site.journal import Journal
from fedveil.flower.site.policy import Policy
from fedveil.streams import Streams

log = logging.getLogger(__name__)
WHO = "site policy"
MOST_RUNS = 64  # whose memory is kept


class Gate:
    """Lets out what the policy has protected, and an error in place of everything else."""

    def __init__(self, policy: Policy, client: int = 0) -> None:
        self.policy, self._client = policy, client
        self._journal = Journal(policy)
        self._states: dict[int, RecordDict] = {}  # by run

    def refuses(self, app: bytes, run: Any) -> str | None:
        """Why a run may not use this site; None where it may. `app`: the bundle that Flower would install."""
        try:
            return self.policy.refuse(get_fused_config_from_fab(app, run), str(run.fab_id))
        except Exception:  # Flower itself would end the SuperNode here
            log.exception("an app could not be read")
            return "the app, or the settings of its run, cannot be read"

    def reply(self, asked: Message, reply: Message) -> Message:
        """The reply that leaves. Never raises, and never returns anything that the app made."""
        category = asked.metadata.message_type.partition(".")[0]
        try:
            if reply.has_error():
                raise FedveilError(reported(reply.error)[0])
            if category not in self.policy.messages:
                raise FedveilError(f"messages of type {category!r:.40} are not answered here")
            content = self._protected(asked, reply, category)
        except FedveilError as error:
            log.warning("%s", error)
            return self.refused(asked, told_of(error, "the reply could not be protected"))
        except Exception as error:
            log.exception("a reply could not be protected")
            return self.refused(asked, f"the reply could not be protected ({type(error).__name__})")
        return Message(content, reply_to=asked)

    def refused(self, asked: Message, why: str) -> Message:
        """An error reply, and a line in the log."""
        log.warning("refused: %s", why)
        try:
            self._note(asked, sent=False, reason=why)
        except Exception:  # nothing leaves all the same
            log.exception("the log cannot be written")
        return refusal(asked, f"{WHO}: {why}")

    def _protected(self, asked: Message, reply: Message, category: str) -> RecordDict:
        state = self._states.setdefault(asked.metadata.run_id, RecordDict())
        while len(self._states) > MOST_RUNS:
            self._states.pop(next(iter(self._states)))
        sender = Sender(self._client, state, Streams.secure([self._client]))
        content = protected_content(self.policy.rules, asked.content, reply.content, category, sender)
        told: dict[str, object] = {"metrics": {k: v for r in content.metric_records.values() for k, v in r.items()}}
        if category == "train":
            sent = told_apart(to_tensors(the_arrays(asked.content, "the server's message")[1]), self.policy.rules)
            told["epsilon"] = self._journal.spend(sent.weights)
            arrays = the_arrays(content, "the reply")[1]
            told["arrays"] = len(arrays)
            told["bytes"] = sum(len(array.data) for array in arrays.values())
            told["sha256"] = hashlib.sha256(b"".join(array.data for array in arrays.values())).hexdigest()
        self._note(asked, sent=True, defense=str(self.policy.rules.chain), **told)
        return content

    def _note(self, asked: Message, **told: object) -> None:
        about = asked.metadata
        self._journal.write(
            run=about.run_id, round=about.group_id, type=about.message_type, message=about.message_id, **told
        )
