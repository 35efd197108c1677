"""Builds cp_attn._C from csrc/, and cp_attn._cuda from cuda/ where there is an nvcc. Everything that is not about
compiling is in pyproject.toml.

Environment: CP_ATTN_WERROR=1 turns warnings into errors; CP_ATTN_SANITIZE=address,undefined instruments the
extensions; CC chooses the compiler. CP_ATTN_CUDA=0 leaves cp_attn._cuda out, CP_ATTN_CUDA=1 fails where it cannot be
built; nvcc is looked for in CUDA_HOME, in PATH and in /usr/local/cuda. CP_ATTN_CUDA_ARCHS="90 100" replaces the
architectures of cuda/architectures.txt.
"""

import os
import platform
import re
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from glob import glob

import numpy
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from tvm_ffi.libinfo import find_dlpack_include_path

JOBS = 2
FLAGS = "-std=c11 -O3 -fvisibility=hidden -fno-math-errno -fno-trapping-math -pthread".split()
WARNINGS = (
    "-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wstrict-prototypes -Wmissing-prototypes -Wvla -Wundef "
    "-Wpointer-arith -Wcast-qual -Wwrite-strings -Wswitch-enum -Wdouble-promotion -Wformat=2"
).split()
# Slots and keyword lists of the C API cannot be written so that these two are silent.
NOT_IN_PY = {"-Wpedantic", "-Wwrite-strings"}
# Nothing but these files gets an ISA flag: the code that chooses among them runs everywhere.
AVX512 = "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma"
ISA_FLAGS = {
    "_avx2.c": "-mavx2 -mfma -mf16c".split(),
    "_avx512.c": AVX512.split(),
    "_avx512bf16.c": f"{AVX512} -mavx512bf16".split(),
}
X86 = platform.machine() in ("x86_64", "AMD64")


# As in csrc/: what has no state of its own is in both modules.
STATELESS = sorted(
    {*glob("csrc/base/*.c"), *(f"csrc/tensor/{name}.c" for name in ("dtype", "nest", "view"))}
    - {"csrc/base/last_error.c", "csrc/base/mem.c"}
)
OLDEST_CUDA = (12, 8)  # the first that knows sm_100 and sm_120


def find_nvcc():
    """Return the path of nvcc, or why there is none that will do."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    places = [*(os.path.join(home, "bin") for home in homes if home), os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    nvcc = shutil.which("nvcc", path=os.pathsep.join(places))
    if nvcc is None:
        return None, "no nvcc in CUDA_HOME, PATH or /usr/local/cuda"
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    version = re.search(r"release (\d+)\.(\d+)", said)
    if version is None or tuple(map(int, version.groups())) < OLDEST_CUDA:
        oldest = ".".join(map(str, OLDEST_CUDA))
        return None, f"{nvcc} is {version[0] if version else 'of an unknown release'}; {oldest} or later is needed"
    return nvcc, ""


def cuda_toolkit(nvcc):
    """Return the folder of the toolkit; nvcc may be a script or a link, and knows best."""
    said = subprocess.run([nvcc, "--dryrun", "-c", "any.cu"], capture_output=True, text=True).stderr
    return os.path.abspath(re.search(r"^#\$ TOP=(.*)$", said, re.M)[1])


def cuda_extension():
    """Return [cp_attn._cuda], or [] with the reason printed."""
    wanted = os.environ.get("CP_ATTN_CUDA", "")
    if wanted not in ("", "0", "1"):
        raise SystemExit(f"CP_ATTN_CUDA is {wanted!r}; allowed: 0, 1, or not set")
    nvcc, reason = (None, "CP_ATTN_CUDA=0") if wanted == "0" else find_nvcc()
    if nvcc is None:
        if wanted == "1":
            raise SystemExit(f"CP_ATTN_CUDA=1, but cp_attn._cuda cannot be built: {reason}")
        print(f"cp_attn._cuda is not built: {reason}")
        return []
    toolkit = cuda_toolkit(nvcc)
    lib = next(d for d in ("lib64", "lib", "targets/x86_64-linux/lib") if glob(f"{toolkit}/{d}/libcudart_static.a"))
    sources = {*glob("cuda/*.c"), *glob("cuda/*.cu")} - {"cuda/nccl_check.c"}
    extension = Extension(
        "cp_attn._cuda",
        sources=[*sorted(sources), *STATELESS],
        depends=sorted({*glob("cuda/*.h"), *glob("cuda/*.cuh"), *glob("csrc/**/*.h", recursive=True)}),
        include_dirs=["csrc", "cuda"],
        define_macros=[("_GNU_SOURCE", None)],
        extra_compile_args=[*extra_compile, "-isystem", f"{toolkit}/include"],
        extra_link_args=[*extra_link, f"{toolkit}/{lib}/libcudart_static.a", "-static-libstdc++"],
        libraries=["dl", "rt"],
        language="c++",
    )
    extension.nvcc = nvcc
    return [extension]


def nvcc_flags():
    with open("cuda/architectures.txt") as file:
        archs = os.environ.get("CP_ATTN_CUDA_ARCHS", file.read()).split()
    flags = "-std=c++20 -O3 -Xcompiler -Wall,-Wextra,-fPIC,-fvisibility=hidden --threads 2".split()
    if os.environ.get("CP_ATTN_WERROR") == "1":
        flags += ["-Werror", "all-warnings"]
    for arch in archs:
        # The last one also as PTX, for what comes after it.
        code = f"[sm_{arch},compute_{arch}]" if arch == archs[-1] else f"sm_{arch}"
        flags += ["-gencode", f"arch=compute_{arch},code={code}"]
    return flags


def is_proof(source):
    """The verifier of schedules proves them in tests; at run time nobody calls it."""
    return os.path.basename(source).startswith("verify")


def is_isa_file(source):
    return source.endswith(tuple(ISA_FLAGS))


def flags_of(source):
    """The flags that only this file gets."""
    in_py = os.sep + "py" + os.sep in source or source.endswith("_module.c")
    flags = [w for w in WARNINGS if not (in_py and w in NOT_IN_PY)]
    return flags + next((isa for suffix, isa in ISA_FLAGS.items() if source.endswith(suffix)), [])


class BuildExt(build_ext):
    """setuptools knows neither flags for one file nor parallel compiling within one extension."""

    def finalize_options(self):
        super().finalize_options()
        # Flags come from the environment too, which no time stamp shows.
        self.force = True

    def build_extensions(self):
        for extension in self.extensions:
            extension.define_macros.append(("CP_VERSION", f'"{self.distribution.get_version()}"'))
        self.compiler.src_extensions.append(".cu")
        self.compiler.compile = self.compile_files
        super().build_extensions()

    def build_extension(self, extension):
        self.nvcc = getattr(extension, "nvcc", None)
        super().build_extension(extension)

    def compile_files(
        self, sources, output_dir=None, macros=None, include_dirs=None, debug=0, extra_postargs=None, depends=None
    ):
        compiler = self.compiler
        macros, objects, extra, pp_opts, build = compiler._setup_compile(
            output_dir, macros, include_dirs, sources, depends, extra_postargs
        )
        cc_args = compiler._get_cc_args(pp_opts, debug, None)

        def one(item):
            target, (source, extension) = item
            if extension == ".cu":
                return compiler.spawn([self.nvcc, *nvcc_flags(), *pp_opts, "-c", source, "-o", target])
            compiler._compile(target, source, extension, cc_args, extra + flags_of(source), pp_opts)

        with ThreadPoolExecutor(JOBS) as pool:
            list(pool.map(one, build.items()))
        return objects


extra_compile = list(FLAGS)
extra_link = ["-pthread"]
if os.environ.get("CP_ATTN_WERROR") == "1":
    extra_compile.append("-Werror")
if os.environ.get("CP_ATTN_SANITIZE"):
    sanitize = ["-fsanitize=" + os.environ["CP_ATTN_SANITIZE"], "-fno-omit-frame-pointer", "-g"]
    extra_compile += sanitize
    extra_link += sanitize
# -isystem, also where the compiler gets -I anyway: warnings are for our own code.
for directory in (sysconfig.get_paths()["include"], numpy.get_include(), find_dlpack_include_path()):
    extra_compile += ["-isystem", directory]

setup(
    cmdclass={"build_ext": BuildExt},
    ext_modules=[
        Extension(
            "cp_attn._C",
            sources=sorted(
                s for s in glob("csrc/**/*.c", recursive=True) if (X86 or not is_isa_file(s)) and not is_proof(s)
            ),
            depends=sorted(glob("csrc/**/*.h", recursive=True)),
            include_dirs=["csrc"],
            define_macros=[
                ("_GNU_SOURCE", None),
                ("NPY_TARGET_VERSION", "NPY_1_25_API_VERSION"),
                ("NPY_NO_DEPRECATED_API", "NPY_1_25_API_VERSION"),
                *([("CP_HAVE_X86", "1")] if X86 else []),
            ],
            extra_compile_args=extra_compile,
            extra_link_args=extra_link,
            libraries=["m"],
        ),
        *cuda_extension(),
    ],
)
