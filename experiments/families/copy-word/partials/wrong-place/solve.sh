cp {{from}} {{from}}{{to}}
