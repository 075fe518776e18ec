"""The C++ kernels on Arm, by a cross compiler and an emulator."""
