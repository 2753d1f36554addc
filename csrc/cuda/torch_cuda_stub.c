// Stands in for libtorch_cuda.so when linking, so that a machine whose torch has no CUDA can build the CUDA library: the
// library then names libtorch_cuda.so among what it needs, and these are the symbols that it may take from there.
void aoti_torch_get_current_cuda_stream(void) {}
void torch_c10_cuda_check_msg(void) {}
void torch_c10_cuda_free_error_msg(void) {}
