// Who the contestants are, and what starts them.
#pragma once

#include "remote.h"

#include <string>
#include <vector>

namespace attune::tools {

// attune itself: this program's hidden command `worker`, with the planner's own choice and default settings.
RemoteSpec attune_spec();

// All peers in the order of the tables, also those that are not installed (RemoteSpec::missing says why). ATTUNE_PEERS
// in the environment names their Python environment, as ./attune sets it; ATTUNE_PEERS_TEST a folder of programs that
// take the peers' place, for tests.
std::vector<RemoteSpec> peer_specs();

// The name as a person would say it: "PyTorch SDPA".
std::string peer_title(const std::string &impl);

} // namespace attune::tools
