#include "selection.h"

namespace kvq {

int64_t check_selection(const Selection &s, int64_t batch, int64_t tokens) {
  int64_t most = 0;
  for (int64_t b = 0; b < batch; b++)
    for (int64_t k = 0; k < s.selections; k++) {
      int32_t count = s.count[b * s.count_stride + k];
      KVQ_CHECK(count >= 0 && count <= s.capacity, "count", "be from 0 to " + std::to_string(s.capacity), count);
      const int32_t *indices = s.indices + b * s.index_stride[0] + k * s.index_stride[1];
      uint32_t largest = 0;  // negative ones are large
      for (int32_t i = 0; i < count; i++) largest = (uint32_t)indices[i] > largest ? (uint32_t)indices[i] : largest;
      KVQ_CHECK(count == 0 || largest < tokens, "indices", "be from 0 to " + std::to_string(tokens - 1),
                (int32_t)largest);
      most = count > most ? count : most;
    }
  return most;
}

}  // namespace kvq
