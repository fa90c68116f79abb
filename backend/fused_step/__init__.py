"""The C++ sources of the fused CPU step; ``backend.fused_build`` compiles them. Start with ``fused_step.cpp``."""
