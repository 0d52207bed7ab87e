// The planner's ranking of strategies, as checked in (generators/catalogue/ranking.json).
#include "registry.h"

namespace attune::rt {

const std::vector<RankingRule> &ranking() {
    static const std::vector<RankingRule> rules{
#include "ranking.inc"
    };
    return rules;
}

} // namespace attune::rt
