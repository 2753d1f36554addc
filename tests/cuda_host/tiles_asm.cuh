// The host twin of csrc/cuda/tiles_asm.cuh is part of mma.cuh.
#pragma once

#include "mma.cuh"
