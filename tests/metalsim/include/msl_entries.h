// The entry points of a build over `msl_entries`, which the generated source defines before.
#pragma clang system_header
extern "C" {
int msl_rt_run(void (*)(void* const*), void* const*, const uint*, const uint*, uint);
int snprintf(char*, size_t, const char*, ...);

// One line a kernel, `name max_threads`, then one a parameter, indented.
const char* msl_describe() {
  static char text[65536];
  size_t at = 0;
  for (const msl::entry& each : msl_entries) {
    at += snprintf(text + at, sizeof text - at, "%s %d\n", each.name, each.max_threads);
    for (const msl::param* p = each.params; p < each.params + each.n; ++p)
      at += snprintf(text + at, sizeof text - at, "  %s %d %c %d %s %d %d\n", p->attribute, p->index, p->kind, p->is_const,
                     p->type, p->size, p->align);
  }
  return text;
}
int msl_run(int index, void* const* buffers, const uint* grid, const uint* group, uint order) {
  return msl_rt_run(msl_entries[index].run, buffers, grid, group, order);
}
}
