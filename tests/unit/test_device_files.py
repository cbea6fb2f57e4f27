"""No rank computes on the CPU where torch cannot use the machine's accelerator, unless its user asked for the CPU."""

import pytest
import torch

from spmd_rl.base.errors import UserError
from spmd_rl.distributed import device_files
from spmd_rl.distributed.device_files import HIDING, device_file, driver
from spmd_rl.distributed.membership import membership
from spmd_rl.tools.doctor import devices
from spmd_rl.tools.doctor.checks import Failed

DRIVERS = {
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024": " (driver 535.183.01)",
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86  Release Build": " (driver 570.86)",
    "something else": "",
}
KFD = "sys/class/kfd/kfd/topology/nodes"
CPU, OWN, LARGE = "simd_count 0\n", "cpu_cores_count 0\nsimd_count 80\n", "cpu_cores_count 0\nsimd_count 128\n"
MACHINES = [
    ([], None),
    (["nvidiactl", "nvidia-uvm", "nvidia-caps/nvidia-cap1", "nvidia-modeset"], None),  # a container without a device
    (["nvidia0", "nvidiactl"], "/dev/nvidia0"),
    (["nvidia3"], "/dev/nvidia3"),
    (["dri/card0", "dri/renderD128", "accel/accel0", "dxg"], None),  # a desktop or laptop
    (["kfd"], "/dev/kfd"),
    ({"kfd": "", f"../{KFD}/0/properties": CPU}, None),  # its module is loaded: that makes the file
    ({"kfd": "", f"../{KFD}/0/properties": CPU, f"../{KFD}/1/properties": OWN}, None),
    ({"kfd": "", f"../{KFD}/1/properties": OWN, f"../{KFD}/2/properties": LARGE}, "/dev/kfd"),
    (["davinci_manager", "devmm_svm"], None),
    (["davinci0", "davinci_manager"], "/dev/davinci0"),
]


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Gives this machine other device files, hides none, and lets torch find no accelerator."""

    def put(files, version=""):
        contents = dict.fromkeys(files, "") if isinstance(files, list) else files
        paths = {tmp_path / "dev" / name: text for name, text in contents.items()}
        for path, text in {**paths, tmp_path / "proc/driver/nvidia/version": version}.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    for name in {name for names in HIDING.values() for name in names} | {"LOCAL_RANK"}:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "dev").mkdir()
    monkeypatch.setattr(device_files, "ROOT", tmp_path)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    return put


@pytest.mark.parametrize(("files", "seen"), MACHINES)
def test_the_file_of_an_accelerator(machine, files, seen):
    machine(files)
    assert (device_file() or [None])[0] == seen


@pytest.mark.parametrize(
    ("name", "value", "file", "hidden"),
    [
        ("CUDA_VISIBLE_DEVICES", "", "nvidia0", True),
        ("CUDA_VISIBLE_DEVICES", "-1", "nvidia0", True),
        ("CUDA_VISIBLE_DEVICES", "0", "nvidia0", False),
        ("CUDA_VISIBLE_DEVICES", "NoDevFiles", "nvidia0", False),  # Slurm says so of a job that asked for none
        ("HIP_VISIBLE_DEVICES", "", "nvidia0", False),
        ("HIP_VISIBLE_DEVICES", "", "kfd", True),
        ("CUDA_VISIBLE_DEVICES", "", "kfd", True),
        ("ASCEND_RT_VISIBLE_DEVICES", "", "davinci0", True),
    ],
)
def test_a_user_who_hides_the_devices_asks_for_the_cpu(machine, monkeypatch, name, value, file, hidden):
    machine([file])
    monkeypatch.setenv(name, value)
    if hidden:
        assert membership().device.type == "cpu"
        return
    with pytest.raises(UserError, match=f"this machine has /dev/{file}"):
        membership()


def test_a_machine_without_one_computes_on_the_cpu(machine):
    machine([])
    assert membership().device.type == "cpu" and devices.devices(None).startswith("no accelerator")


def test_the_doctor_measures_on_the_cpu_where_a_build_for_cuda_finds_no_device(monkeypatch):
    def current(check_available=False):
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current)
    assert devices.dtype(None).startswith("bfloat16 at ")


@pytest.mark.parametrize(
    ("cuda", "hip", "build"), [("13.0", None, "CUDA 13.0"), (None, "7.1", "ROCm 7.1"), (None, None, "no GPU")]
)
def test_the_line_names_the_file_the_driver_the_build_and_the_cure(machine, monkeypatch, cuda, hip, build):
    machine(["nvidia0"], next(iter(DRIVERS)))
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(UserError) as told:
        membership()
    line = str(told.value)
    assert "/dev/nvidia0 (driver 535.183.01)" in line and f"torch {torch.__version__}, built for {build}" in line
    assert "no device, CUDA_VISIBLE_DEVICES=7: install" in line and "CUDA_VISIBLE_DEVICES= (empty)" in line
    assert "\n" not in line
    with pytest.raises(Failed) as found:
        devices.devices(None)
    assert f"{found.value.detail}: {found.value.cure}" == line


@pytest.mark.parametrize(("text", "version"), DRIVERS.items())
def test_the_version_of_the_driver(machine, text, version):
    machine(["nvidia0"], text)
    assert driver() == version


def test_a_driver_that_does_not_say(machine):
    assert driver() == ""
