"""`spmd_rl.rlvr` with `placement.attach`: a job whose ranks all generate, for a training job that it attaches to.

    torchrun --standalone -m spmd_rl.rlvr +experiment=demo placement.mode=split placement.generate=attached \
        placement.attach=auto

The line is that of the training job (`rlvr_attached.py`) with one setting more; engine and number of ranks are its
own. Its directory is `run.dir/attached/HOST-PORT`. It works until the run is over, and may be killed and started at any
time.
"""

from spmd_rl.config import RlvrConfig


def run(cfg: RlvrConfig) -> None:
    """Generate for the training job until its run is over."""
    from spmd_rl import sidecar
    from spmd_rl.data import Prompts

    prompts = Prompts.load(cfg.data, cfg.steps > 0)  # before torch: a mistake in a row is told within a second
    sidecar.check_domains({p.domain for p in (*prompts.train, *prompts.eval)}, cfg.reward)

    from spmd_rl.distributed import World, agree_on_dtype, agree_on_start
    from spmd_rl.model.tokenizer import load_tokenizer
    from spmd_rl.split import Crew, attach

    tokenizer = load_tokenizer(cfg.policy.model, cfg.policy.trust_remote_code, cfg.data.chat_template_kwargs)
    with World.open(cfg) as world, world.resources() as stack:  # [all]
        agree_on_start(world, cfg, {"data.train": prompts.train, "data.eval": prompts.eval})  # [all]
        agree_on_dtype(world, cfg)  # [all]
        side = stack.enter_context(attach(cfg, {"data": prompts.fingerprint()}, world))  # [all]
        with Crew.build(cfg, prompts, tokenizer, side, world) as crew:  # [all]
            crew.run_attached()  # [all] until the run is over
