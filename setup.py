"""What lies beside the package in a clone lies inside of it in a wheel, where folders of these names are the users'."""

from setuptools import find_packages, setup

BUNDLED = ("configs", "envs", "launch", "rewards")

setup(
    packages=[
        *find_packages(include=["spmd_rl", "spmd_rl.*"]),
        *(f"spmd_rl.bundled.{name}" for name in find_packages(include=[*BUNDLED, *(f"{name}.*" for name in BUNDLED)])),
    ],
    package_dir={f"spmd_rl.bundled.{name}": name for name in BUNDLED},
)
