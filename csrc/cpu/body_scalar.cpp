// The bodies for scalar. Only intrinsics and plain C are included: an inline function of a std or torch header compiled
// here could be merged with its twin elsewhere and then run on a machine without the instructions.
#define KVQ_ISA scalar
#define KVQ_VECTORS "vec_scalar.h"
#include "body.h"
