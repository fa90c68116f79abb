"""C++ sources of the fused CPU step, which ``runners/fused/build.py`` compiles. Start with ``fused_step.cpp``."""
