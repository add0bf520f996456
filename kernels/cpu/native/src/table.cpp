// This variant's functions as one table.
#include "variant.h"

#define CHATKV_STRING(name) #name
#define CHATKV_NAME(name) CHATKV_STRING(name)
#define CHATKV_JOIN(a, b) a##b
#define CHATKV_GETTER(name) CHATKV_JOIN(name, _kernels)

namespace chatkv {

const Kernels* CHATKV_GETTER(CHATKV_VARIANT)() {
    static const Kernels kernels = {
        CHATKV_NAME(CHATKV_VARIANT),
        CHATKV_VARIANT::embed,
        CHATKV_VARIANT::norm_quantise,
        CHATKV_VARIANT::quantise,
        CHATKV_VARIANT::silu_mul_quantise,
        CHATKV_VARIANT::linear,
        CHATKV_VARIANT::rope_store,
        CHATKV_VARIANT::attend_chunk,
        CHATKV_VARIANT::attend_part,
        CHATKV_VARIANT::attend_combine,
    };
    return &kernels;
}

} // namespace chatkv
