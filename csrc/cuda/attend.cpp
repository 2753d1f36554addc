// attend: the decode kernel where it has one for the problem, else tiles.
#include "attend_run.h"
#include "decode_attend.h"
#include "tiles_run.h"

namespace kvq {
namespace cuda {

void run_attention(Call &call, const Attention &a) {
  if (!decode_fits(a)) return tiles::run(call, a, tiles::ATTEND);
  int64_t bytes = decode_scratch_bytes(a);
  launch_decode(a, bytes ? call.scratch(bytes) : nullptr, call.stream());
}

namespace {

void attend(const Tensor &q, const Tensors &keys, const Tensors &values, const Tensor &exact_keys,
            const Tensor &exact_values, const OptionalTensor &mask, const OptionalTensor &sink_logits, int64_t start,
            int64_t length, int64_t num_sinks, double scale, double softcap, const Tensor &out, const Tensor &lse) {
  Call call("q", q);
  Attention a = attend_problem(q, keys, values, exact_keys, exact_values, mask, sink_logits, start, length, num_sinks,
                               scale, softcap, out, lse);
  run_attention(call, a);
  call.check("attend");
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torch_kvq, CUDA, m) { m.impl("attend", TORCH_BOX(&attend)); }

}  // namespace cuda
}  // namespace kvq
