"""Confinement of a process on Linux by plain system calls: Landlock, seccomp and private mounts. Standard library only.

    program = seccomp_program(processes=False)                  # in the parent, once
    landlock({"/box": WRITE})                                   # in the child; cannot be undone
    install_seccomp(program)                                    # last, since it allows none of the above

Numbers are those of linux/seccomp.h, filter.h, landlock.h, asm/unistd_64.h.
"""

import ctypes
import os
import platform
import struct

LIBC = ctypes.CDLL(None, use_errno=True)

NEW_NS, NEW_UTS, NEW_IPC, NEW_PID, NEW_NET = 0x00020000, 0x04000000, 0x08000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 32, 0x1000, 0x4000, 0x40000
MNT_DETACH = 2
# a root is mounted there, in a private mount namespace: this directory exists everywhere
ROOT = "/proc"
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER = 38, 22, 36


def call(name: str, *args: int | bytes | None) -> int:
    """Call a function of libc. OSError if it fails."""
    result = getattr(LIBC, name)(*(ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args))
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
    return result


def drop_capabilities() -> None:
    """Give up all capabilities of this process. OSError if refused."""
    call("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))  # _LINUX_CAPABILITY_VERSION_3, this process


def mount_tmpfs(target: str, num_bytes: int, mode: int) -> None:
    """Mount a file system in memory. OSError without CAP_SYS_ADMIN."""
    options = f"size={num_bytes},nr_inodes=1024,mode={mode:o}".encode()
    call("mount", b"tmpfs", target.encode(), b"tmpfs", MS_NOSUID, options)


def mount_root() -> None:
    """Change to a root in memory with `/dev/null` and two empty directories. OSError if refused."""
    call("unshare", NEW_NS | NEW_NET | NEW_IPC | NEW_UTS)
    call("mount", None, b"/", None, MS_REC | MS_PRIVATE, None)
    mount_tmpfs(ROOT, 1 << 20, 0o755)
    for name in ("box0", "box1", "dev"):
        os.mkdir(f"{ROOT}/{name}")
    os.mknod(f"{ROOT}/dev/null")
    call("mount", b"/dev/null", f"{ROOT}/dev/null".encode(), None, MS_BIND, None)
    read_only = MS_REMOUNT | MS_BIND | MS_RDONLY
    call("mount", None, ROOT.encode(), None, read_only, None)
    os.chroot(ROOT)
    os.chdir("/")


# -- Landlock -------------------------------------------------------------------------------------------------------

READ, WRITE = 1, 2
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _REFER, _TRUNCATE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 13, 1 << 14
_CHANGE = _WRITE_FILE | 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8 | 1 << 12  # remove and make files, directories, sockets
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446


def landlock_version() -> int:
    """Return the version of the kernel's Landlock ABI, or 0."""
    return max(0, LIBC.syscall(_CREATE_RULESET, None, ctypes.c_long(0), ctypes.c_long(1)))


def landlock(paths: dict[str, int]) -> None:
    """Deny this process all files except those below `paths`, and all of TCP. OSError without Landlock.

    PR_SET_NO_NEW_PRIVS must be set. A path may be a file.
    """
    version = landlock_version()
    files = (1 << {0: 0, 1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    network, scoped = (3 if version >= 4 else 0), (3 if version >= 6 else 0)
    attributes = struct.pack("QQQ", files, network, scoped)[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = call("syscall", _CREATE_RULESET, attributes, len(attributes), 0)
    for path, rights in paths.items():
        allowed = _READ_FILE | (_READ_DIR if os.path.isdir(path) else 0)
        if rights & WRITE:
            allowed |= _CHANGE | _REFER | _TRUNCATE if os.path.isdir(path) else _WRITE_FILE | _TRUNCATE
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        call("syscall", _ADD_RULE, ruleset, 1, struct.pack("=Qi", allowed & files, fd), 0)
        os.close(fd)
    call("syscall", _RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


# -- seccomp --------------------------------------------------------------------------------------------------------

_X86_64 = 0xC000003E
_X32 = 0x40000000
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_LOAD, _EQUAL, _GREATER, _ANY_BIT, _RETURN, _AND = 0x20, 0x15, 0x35, 0x45, 0x06, 0x54
_NR, _ARCH, _ARGUMENTS = 0, 4, 16

_ALLOWED = [
    *(*range(9), *range(10, 16)),  # read ... lseek, mprotect ... rt_sigreturn
    *range(17, 29),  # pread64 ... madvise
    *range(32, 40),  # dup ... getpid
    *(44, 45, 47, 48, 51, 52),  # on the sockets that it has: sendto recvfrom recvmsg shutdown and their names
    *range(60, 64),  # exit wait4 kill uname
    *range(73, 92),  # flock ... fchmod
    *range(95, 101),  # umask ... times
    *(102, 104, 107, 108, 109, 110, 111, 112, 115, 118, 120, 121, 124),  # who am I
    *(127, 128, 130, 131, 132, 137, 138, 140, 143, 145, 146, 147, 158, 160, 186),
    *(201, 202, 204, 213, 217, 218, 221, 228, 229, 230, 231, 232, 233, 234, 235, 247),
    *(257, 258, 262, 263, 264, 265, 266, 267, 268, 269, 270, 271, 273, 274, 280, 281),
    *(283, 284, 285, 286, 287, 290, 291, 292, 293, 295, 296, 302, 316, 318, 324, 326, 327, 328),
    *(332, 334, 436, 439, 441),  # statx rseq close_range faccessat2 epoll_pwait2
]
"""x86-64 numbers of calls that Python programs need. Not among them: sockets, namespaces, mounts, ptrace, memory of
other processes, keys, BPF, io_uring, memory without an address space (memfd, shared segments), modules, clocks, reboot,
execve, and calls that take kernel memory without a limit: larger socket buffers, descriptors in flight (sendmsg),
inotify.
"""
_MMAP, _IOCTL, _SOCKETPAIR, _GETSOCKOPT, _FCNTL, _PRCTL = 9, 16, 53, 55, 72, 157
_CLONE, _FORK, _VFORK, _CLONE3 = 56, 57, 58, 435
_SOME = (
    (_IOCTL, 1, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),  # a terminal? how large, how much is there, flags
    (_SOCKETPAIR, 0, (1,)),  # AF_UNIX
    (_GETSOCKOPT, 2, (3, 4, 38)),  # type, error, protocol; not the peer's pidfd
    (_FCNTL, 1, (0, 1, 2, 3, 4, 1030, 1032)),  # copy, flags, a pipe's size; no larger pipe, no lock on each byte
    (_PRCTL, 0, (3, 15, 16, 21)),  # dumpable? thread name, seccomp?
)
"""Calls allowed for some values of an argument: (call, argument, values)."""
# each such mapping takes a file of the kernel's; without other processes it has no use
_SHARED_ANONYMOUS = 0x21
_CLONE_THREAD = 0x10000
_CLONE_NEW = 0x7E020080  # any namespace


def seccomp_supported() -> bool:
    """Return True if these numbers are this machine's."""
    return platform.machine() == "x86_64" and struct.calcsize("P") == 8


def seccomp_program(processes: bool) -> bytes:
    """Return a filter of the calls that a Python program needs. Others fail with EPERM; those of another ABI kill.

    `processes` allows forks. Threads are always allowed.
    """
    steps = [(_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, _X86_64), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, _NR)]
    steps += [(_GREATER, 0, 1, _X32), (_RETURN, 0, 0, _KILL)]
    # clone3 has its flags in memory, which a filter cannot read: with ENOSYS libc uses clone
    steps += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ERRNO | _ENOSYS)]
    for number, argument, values in _SOME:
        steps.append((_EQUAL, 0, len(values) + 3, number))
        steps.append((_LOAD, 0, 0, _ARGUMENTS + 8 * argument))
        steps += [(_EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)]
        steps += [(_RETURN, 0, 0, _ERRNO | _EPERM), (_RETURN, 0, 0, _ALLOW)]
    steps += [(_EQUAL, 0, 5, _MMAP), (_LOAD, 0, 0, _ARGUMENTS + 8 * 3), (_AND, 0, 0, _SHARED_ANONYMOUS)]
    steps += [(_EQUAL, int(processes), 1, _SHARED_ANONYMOUS), (_RETURN, 0, 0, _ERRNO | _EPERM), (_RETURN, 0, 0, _ALLOW)]
    steps += [(_EQUAL, 0, 5, _CLONE), (_LOAD, 0, 0, _ARGUMENTS), (_ANY_BIT, 1, 0, _CLONE_NEW)]
    steps += [(_ANY_BIT, 1, 0, 0xFFFFFFFF if processes else _CLONE_THREAD)]
    steps += [(_RETURN, 0, 0, _ERRNO | _EPERM), (_RETURN, 0, 0, _ALLOW)]
    allowed = [*_ALLOWED, *([_FORK, _VFORK] if processes else [])]
    steps += [(_EQUAL, len(allowed) - i, 0, number) for i, number in enumerate(allowed)]
    steps += [(_RETURN, 0, 0, _ERRNO | _EPERM), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("HBBI", *step) for step in steps)


def install_seccomp(program: bytes) -> None:
    """Filter this process's system calls. OSError if the kernel cannot."""
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HP", len(program) // 8, ctypes.addressof(buffer))
    call("prctl", PR_SET_SECCOMP, 2, header, 0, 0)
