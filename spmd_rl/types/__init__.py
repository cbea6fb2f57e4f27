"""The vocabulary of the package: data that passes between stages (`data`) and the interfaces of plug-ins (`plugins`).
Torch-free.
"""

# ruff: noqa: F401  imported here to be had from `spmd_rl.types`
from spmd_rl.types.data import (
    MISSING_PACKAGE,
    PICTURE,
    SCORED,
    SUSPECT,
    UNPROVEN,
    AgentStep,
    AnswerInfo,
    CandidateIds,
    Completion,
    Conversation,
    Example,
    FinishReason,
    Group,
    ImagePart,
    Message,
    Prompt,
    Request,
    Sample,
    TextPart,
    Turn,
    Verdict,
    VerdictStatus,
    concat,
    unknown_fields,
)
from spmd_rl.types.pictures import picture_ids
from spmd_rl.types.plugins import (
    CheckResult,
    Environment,
    Environments,
    EnvReply,
    Http,
    LostReason,
    Node,
    Rewarder,
    RunEnd,
    RunLimits,
    RunResult,
    Sandbox,
    Scorer,
    Session,
    SessionLost,
)
