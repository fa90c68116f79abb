"""C++ sources of the fused CPU step, which `backend/runners/fused/build.py` compiles into one shared library.

`simd.h` is the only file that knows the instruction set. Read `fused_step.cpp` first, then `model.h`. Uses no other
room.
"""
