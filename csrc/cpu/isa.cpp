// Choice of the kernels at run time: precision follows the dtype of the query. Left to itself ("auto"), float32 is
// answered in float32, and bfloat16 and float16 by 16-bit integers where the machine multiplies them faster. An
// instruction set chosen by name answers every dtype.
//
//   torch_kvq::_cpu_choice(name)  the choice in force, auto or an instruction set; a name that is not empty replaces it
//   torch_kvq::_cpu_isa(half)     what answers float32 queries, or 16-bit ones
//   torch_kvq::_cpu_isas()        the instruction sets of this machine, fastest first
#include "bodies.h"
#include "run.h"

#include <atomic>

namespace kvq {

namespace {

struct Choice {
  std::string name;
  const Kernels *full, *half;  // of float32 queries, of bfloat16 and float16 ones
};

// auto, then the instruction sets of this machine, fastest first.
std::vector<Choice> find_choices() {
  std::vector<Body> bodies = bodies_here();
  const Body *exact = &bodies[0];
  while (exact->integer) exact++;
  std::vector<Choice> choices = {{"auto", exact->kernels, bodies[0].kernels}};
  for (const Body &body : bodies) choices.push_back({body.kernels->name, body.kernels, body.kernels});
  return choices;
}

const std::vector<Choice> choices = find_choices();
std::atomic<const Choice *> in_use{&choices[0]};

std::string names(size_t first) {
  std::string text;
  for (size_t i = first; i < choices.size(); i++) text += (i == first ? "" : ",") + choices[i].name;
  return text;
}

std::string cpu_choice(std::string name) {
  const Choice *before = in_use, *found = name.empty() ? before : nullptr;
  for (const Choice &choice : choices)
    if (choice.name == name) found = &choice;
  KVQ_CHECK(found, "name", "be a choice of this machine among " + names(0), name);
  in_use = found;
  return before->name;
}

std::string cpu_isa(bool half) { return kernels(half ? BFLOAT16 : FLOAT32).name; }

std::string cpu_isas() { return names(1); }

}  // namespace

const Kernels &kernels(Dtype query) {
  const Choice *choice = in_use.load(std::memory_order_relaxed);
  return query == FLOAT32 ? *choice->full : *choice->half;
}

STABLE_TORCH_LIBRARY_FRAGMENT(torch_kvq, m) {
  m.def("_cpu_choice(str name) -> str");
  m.def("_cpu_isa(bool half) -> str");
  m.def("_cpu_isas() -> str");
}
STABLE_TORCH_LIBRARY_IMPL(torch_kvq, CompositeExplicitAutograd, m) {
  m.impl("_cpu_choice", TORCH_BOX(&cpu_choice));
  m.impl("_cpu_isa", TORCH_BOX(&cpu_isa));
  m.impl("_cpu_isas", TORCH_BOX(&cpu_isas));
}

}  // namespace kvq
