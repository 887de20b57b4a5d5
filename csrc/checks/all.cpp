#include "checks/results.h"

namespace ridgeline {

Results compute() {
    Results results;
    Pool pool(1);
    check_products(pool, results);
    check_attention(pool, results);
    check_recurrences(pool, results);
    check_elements(pool, results);
    return results;
}

}  // namespace ridgeline
