"""The error tree: every failure that TideRL knows has a type, and says what, where and what to do.

Knows nothing but strings. A message is one or two lines; `where` names a file and key, a rank, an
environment or a request. Failures that end a trajectory carry the `reason` written to the journal.
"""

from __future__ import annotations


class TideError(Exception):
    """Base of all errors raised on purpose. `str()` is one line: what (where). What to do."""

    reason = "error"
    advice = ""
    """The hint of those that give none of their own."""

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        self.what, self.where, self.hint = what, where, hint
        super().__init__(what)

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        hint = self.hint or self.advice
        return f"{text}\n  {hint}" if hint else text


class ConfigurationError(TideError):
    """The user's configuration, command line or installation is at fault; exit code 2."""

    reason = "configuration"


class MissingExtraError(ConfigurationError):
    """A feature needs a package outside the base install; the hint names the extra. `steps`: where those are told, if
    it takes more than one."""

    def __init__(self, package: str, extra: str, *, where: str = "", steps: str = "") -> None:
        one = f"install it with: pip install 'tiderl[{extra}]'"
        super().__init__(
            f"the package {package!r} is not installed",
            where=where,
            hint=f"the extra {extra} brings it, in more steps than one: {steps}" if steps else one,
        )


class EnvironmentFault(TideError):
    """The environment raised, hung past its deadline or answered nonsense (architecture §8)."""

    reason = "environment_fault"


class EnvironmentRaised(EnvironmentFault):
    """The environment's own code raised an exception."""

    reason = "environment_raised"


class EnvironmentTimeout(EnvironmentFault):
    """The environment did not answer within `env.deadline_s`."""

    reason = "environment_timeout"


class EnvironmentNonsense(EnvironmentFault):
    """The answer is not of the protocol: None, a non-finite reward, a wrong type, an endless text."""

    reason = "environment_nonsense"


class EnvironmentMemory(EnvironmentFault):
    """It took more memory than it may (`memory_limit_bytes` of its class)."""

    reason = "environment_memory"


class FirstObservationTooLong(EnvironmentFault):
    """The first observation leaves no room in `rollout.max_context_tokens`."""

    reason = "first_observation_too_long"


class HopelessEnvironment(TideError):
    """So many episodes in a row failed that the run would never end."""

    reason = "hopeless_environment"


class VerifierFault(TideError):
    """`score` raised, hung or answered a non-finite number."""

    reason = "verifier_fault"


class InfrastructureFault(TideError):
    """A rank, worker process or channel failed; never the policy's fault, never trained as reward 0."""

    reason = "infrastructure"


class RankLost(InfrastructureFault):
    """The process of a rank died or its channel closed."""

    reason = "rank_lost"


class ChannelTimeout(InfrastructureFault):
    """A request got no answer within its deadline."""

    reason = "channel_timeout"
    advice = "that process hangs or is overloaded: its log is in the run's logs/; the run can be resumed"


class BudgetError(TideError):
    """Something does not fit a budget of tokens, turns or memory."""

    reason = "budget"


class RequestTooLarge(BudgetError):
    """A request that can never fit: larger than the context or than the replica's whole KV budget."""

    reason = "request_too_large"


class NumericalFault(TideError):
    """Logits, losses or gradients that are not finite; names the request or update."""

    reason = "numerical"
    advice = "if a resumed run ends there too, start a new one with a lower train.lr or train.dtype float32"


class CheckpointError(TideError):
    """A checkpoint, journal or run directory cannot be written or read."""

    reason = "checkpoint"


class RunLockedError(CheckpointError):
    """Another live driver holds the run directory."""

    reason = "run_locked"


class DeadlockError(TideError):
    """The run can make no progress; the message names who waits for whom."""

    reason = "deadlock"


class InvariantViolation(TideError):
    """One of I1…I12 does not hold: a fault of TideRL itself, never of its user."""

    reason = "invariant"


class RunStopped(TideError):
    """The run ended early because it was asked to (Ctrl-C, SIGTERM); `what` says what was saved. Exit code 130."""

    reason = "stopped"
