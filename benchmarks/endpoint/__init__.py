"""The endpoint under load: beside other servers, with clients that leave, through an update."""
