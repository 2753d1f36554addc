// What the library was built for, as text that is found in the file on a machine where it cannot be loaded
// (torch_kvq/backends/cuda.py).
__attribute__((used)) static const char archs[] = "KVQ_CUDA_ARCHS=" KVQ_CUDA_ARCHS;
