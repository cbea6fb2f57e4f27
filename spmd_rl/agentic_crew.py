"""`spmd_rl.agentic` with `placement.attach`: a job whose ranks all play, for a training job that it attaches to.

    torchrun --standalone -m spmd_rl.agentic +experiment=demo_frozen_lake placement.mode=split \
        placement.generate=attached placement.attach=auto

As `rlvr_crew`, with environments in the place of prompts.
"""

from spmd_rl.config import AgenticConfig


def run(cfg: AgenticConfig) -> None:
    """Play for the training job until its run is over."""
    from spmd_rl.data import EnvTasks
    from spmd_rl.distributed import World, agree_on_dtype, agree_on_start
    from spmd_rl.model.tokenizer import load_tokenizer
    from spmd_rl.split import Crew, attach

    tasks = EnvTasks(cfg.env, cfg.eval.prompts)
    tokenizer = load_tokenizer(cfg.policy.model, cfg.policy.trust_remote_code, cfg.env.chat_template_kwargs)
    with World.open(cfg) as world, world.resources() as stack:  # [all]
        agree_on_start(world, cfg, {"env": tasks.eval})  # [all]
        agree_on_dtype(world, cfg)  # [all]
        side = stack.enter_context(attach(cfg, {"data": tasks.fingerprint()}, world))  # [all]
        with Crew.build(cfg, tasks, tokenizer, side, world) as crew:  # [all]
            crew.run_attached()  # [all] until the run is over
