// Stand-alone program of the sanitizer builds. Without arguments it prints what msl_describe() says; else
//   program KERNEL grid.x y z group.x y z ORDER FILE...
// runs a kernel. A file is a buffer: read into an allocation of its exact size, and written back.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

extern "C" {
const char *msl_describe();
int msl_run(int kernel, void *const *buffers, const uint32_t *grid, const uint32_t *group, uint32_t order);
const char *msl_rt_error();
}

struct Buffer {
  const char *path;
  size_t size;
  void *data;
};

static Buffer read(const char *path) {
  FILE *file = fopen(path, "rb");
  fseek(file, 0, SEEK_END);
  Buffer buffer{path, (size_t)ftell(file), nullptr};
  rewind(file);
  buffer.data = malloc(buffer.size ? buffer.size : 1);
  if (fread(buffer.data, 1, buffer.size, file) != buffer.size) exit(2);
  fclose(file);
  return buffer;
}

int main(int argc, char **argv) {
  if (argc == 1) return fputs(msl_describe(), stdout), 0;
  uint32_t grid[3], group[3];
  for (int k = 0; k < 3; ++k) grid[k] = atoi(argv[2 + k]), group[k] = atoi(argv[5 + k]);
  std::vector<Buffer> buffers;
  std::vector<void *> data;
  for (int i = 9; i < argc; ++i) buffers.push_back(read(argv[i])), data.push_back(buffers.back().data);
  if (msl_run(atoi(argv[1]), data.data(), grid, group, atoi(argv[8]))) return fprintf(stderr, "%s\n", msl_rt_error()), 3;
  for (const Buffer &buffer : buffers) {
    FILE *file = fopen(buffer.path, "wb");
    if (fwrite(buffer.data, 1, buffer.size, file) != buffer.size || fclose(file)) return 2;
  }
  return 0;
}
