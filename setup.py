"""Builds cp_attn._C from csrc/. Everything that is not about compiling is in pyproject.toml.

Environment: CP_ATTN_WERROR=1 turns warnings into errors; CP_ATTN_SANITIZE=address,undefined
instruments the extension; CC chooses the compiler.
"""

import os
import platform
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


def is_proof(source):
    """The verifier of schedules proves them in tests; at run time nobody calls it."""
    return os.path.basename(source).startswith("verify")


def is_isa_file(source):
    return source.endswith(tuple(ISA_FLAGS))


def flags_of(source):
    """The flags that only this file gets."""
    in_py = os.sep + "py" + os.sep in source
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
        self.compiler.compile = self.compile_files
        super().build_extensions()

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
        )
    ],
)
