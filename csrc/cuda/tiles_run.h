// attend, qk and pv in tiles.
#pragma once

#include "call.h"
#include "tiles.h"

namespace kvq {
namespace cuda {
namespace tiles {

void run(Call &call, const Attention &a, Mode mode);

}  // namespace tiles
}  // namespace cuda
}  // namespace kvq
