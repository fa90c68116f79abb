"""C++ sources of the fused CPU step, which `backend/runners/fused/build.py` compiles into one shared library.

Only `simd.h` and, for Arm, `neon.h` know the instruction set. Read `fused_step.cpp` first, then `model.h`. Uses no
other subpackage.
"""
